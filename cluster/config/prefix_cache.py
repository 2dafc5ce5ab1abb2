"""What is kept of prompts that were computed, and who may find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from cluster.config.access import AuthConfig
from cluster.config.conflicts import Conflict
from cluster.config.fairness import FairnessConfig
from cluster.config.pool import PoolsConfig
from cluster.config.section import Section

CacheIsolation = Literal["none", "client", "key"]


class PrefixCacheConfig(Section):
    """What is kept of the KV of prompts and answers, so that a prompt which begins alike need not be computed again."""

    enabled: bool = Field(
        default=True,
        description="Keep it, in KV memory that nobody else needs, on all engines. false: every prompt is computed",
    )
    isolation: Literal["auto", "none", "client", "key"] = Field(
        default="auto",
        description="Who finds what others have computed, which the time to a first token gives away. key: nobody but "
        "who sends the same API key. client: who is the same client by fairness.by. none: everybody. auto: key if auth "
        "asks for keys, else none. In each case the cache_salt of a request divides further",
    )

    def isolation_with(self, auth: AuthConfig) -> CacheIsolation:
        """What holds."""
        if self.isolation == "auto":
            return "key" if auth.is_on else "none"
        return self.isolation


def host_memory_conflicts(prefix_cache: PrefixCacheConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    """Nobody gives way at prefill: only the cache has a use for its host memory."""
    key = "pools.prefill.host_memory_bytes"
    if pools.prefill is not None and pools.prefill.host_memory_bytes and not prefix_cache.enabled:
        reason = f"{pools.prefill.host_memory_bytes} bytes of no use with prefix_cache.enabled false; remove it, or "
        yield Conflict(key, reason + "set prefix_cache.enabled: true", (key, "prefix_cache.enabled"))


def prefix_cache_conflicts(
    prefix_cache: PrefixCacheConfig, auth: AuthConfig, fairness: FairnessConfig
) -> Iterator[Conflict]:
    """Who asks for isolation gets it: not one tenant of all, because nothing tells clients apart."""
    key = "prefix_cache.isolation"
    if prefix_cache.isolation == "key" and not auth.is_on:
        reason = '"key" without API keys: nobody is told apart; set auth.api_keys_file or auth.api_keys_env, or, '
        reason += "behind a gateway that knows the clients, isolation: client and fairness.by"
        yield Conflict(key, reason, (key, "auth"))
    if prefix_cache.isolation == "client" and fairness.by == "none":
        reason = '"client" with fairness.by none: all are one client; set fairness.by to api_key or header'
        yield Conflict(key, reason, (key, "fairness.by"))
