"""What replicas are expected to have of a prompt, what is told of it when it is sent, and what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from cluster.policies.routing_policy import Route
from cluster.routing.key_feed import KeyFeed
from cluster.routing.prefix_index import PrefixIndex, pieces_of, tokens_of
from cluster.routing.prompt_keys import PromptKeys
from cluster.routing.replica_registry import ReplicaTable
from replicas.messages import CallStatus, GenerateReply, GenerationSpec, PrefillReply
from scheduler.prefix_hash import chain_start

# As long as the event loop may be held up by hashing at a time: 0.5 ms.
_PIECES_AT_A_TIME = 64


class SentPrompt:
    """Of one attempt, as it goes. These methods do nothing: there is no index. None of them raises."""

    async def went_out(self) -> None:
        """Its calls are on their way. Waits for nothing but other tasks' turns."""

    def tell(self) -> None:
        """As went_out, at once."""

    def prefilled(self, reply: PrefillReply) -> None:
        """The prefill replica has computed it."""

    def ended(self, call: asyncio.Task[GenerateReply]) -> None:
        """The generate call is over: answered, failed or cancelled."""

    def generated(self, num_found: int | None) -> None:
        """As ended. num_found: tokens of the prompt that decode had; None: it was not answered as it should be."""

    def close(self) -> None:
        """The attempt is over; its generate call may not be. Idempotent."""


class PromptForecast:
    """Of one prompt, over the decisions about it. This one expects nothing: there is no index."""

    def cached(self) -> Mapping[str, int]:
        """Tokens that need not be computed, or read, by replica; of those that have any. As of now."""
        return {}

    def sent(self, route: Route) -> SentPrompt:
        """An attempt at it begins on this route."""
        return SentPrompt()


class PrefixForecasts:
    """One for each router, on its event loop."""

    def __init__(
        self,
        has_prefix_cache: bool,
        block_size: int,
        tell_found: Callable[[str, int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """has_prefix_cache: else nothing is hashed, kept or expected. tell_found: of each answer the pool, and how many
        tokens of the prompt were expected there and found."""
        self.index = PrefixIndex() if has_prefix_cache else None
        self.block_size, self.tell_found, self.clock = block_size, tell_found, clock
        self._nothing = PromptForecast()

    def of(self, spec: GenerationSpec) -> PromptForecast:
        """spec: an attempt's."""
        return self._nothing if self.index is None else IndexedForecast(self, self.index, spec)

    def present(self, tables: Iterable[ReplicaTable]) -> None:
        """These replicas there are now. Mutates."""
        if self.index is not None:
            self.index.present(tables)

    def feed(self, pool: str) -> KeyFeed | None:
        """What takes the word of this pool's replicas; None: nobody wants to know."""
        return None if self.index is None else KeyFeed(self.index, pool)


class IndexedForecast(PromptForecast):
    """By an index. believed: pieces by replica, as of the last decision; those that somebody has."""

    def __init__(self, of: PrefixForecasts, index: PrefixIndex, spec: GenerationSpec) -> None:
        self.of, self.index, self.spec = of, index, spec
        # An engine looks nothing up for a prompt that is to be scored: it needs all its hidden states.
        self._may_hit = spec.use_cache and spec.sampling.num_prompt_logprobs is None
        self._keys: dict[str, PromptKeys] = {}
        self.believed: dict[str, int] = {}

    def cached(self) -> Mapping[str, int]:
        if not self._may_hit:
            return {}
        index, now_s = self.index, self.of.clock()
        self.believed = {}
        for fingerprint in index.fingerprints:
            self.believed |= index.expected(self.keys(fingerprint), now_s)
        return {name: self._tokens(name, num_pieces) for name, num_pieces in self.believed.items()}

    def _tokens(self, replica_id: str, num_pieces: int) -> int:
        num_tokens = self.index.credit(replica_id) * tokens_of(num_pieces, self.spec.prompt_len, self.of.block_size)
        return int(num_tokens) // self.of.block_size * self.of.block_size

    def keys(self, fingerprint: str) -> PromptKeys:
        """Of this prompt, in the names of those with this fingerprint."""
        keys = self._keys.get(fingerprint)
        if keys is None:
            start = chain_start(fingerprint, self.spec.cache_salt)
            keys = self._keys[fingerprint] = PromptKeys(start, self.spec.prompt_ids, self.of.block_size)
        return keys

    def sent(self, route: Route) -> SentPrompt:
        fingerprint = self.index.fingerprint_of(route.decode_id)
        return SentPrompt() if fingerprint is None else _IndexedPrompt(self, self.keys(fingerprint), route)


class _IndexedPrompt(SentPrompt):
    """What it was believed to have each replica's answer is held against."""

    def __init__(self, forecast: IndexedForecast, keys: PromptKeys, route: Route) -> None:
        self._of, self._index, self._spec = forecast.of, forecast.index, forecast.spec
        self._keys, self._route, self._believed = keys, route, forecast.believed
        self._num_uses = self._index.num_uses
        self._untold = {name for name in (route.decode_id, route.prefill_id) if name is not None}
        self._told: set[str] = set()

    async def went_out(self) -> None:
        while self._keys.num_unhashed:
            self._keys.hash_some(_PIECES_AT_A_TIME)
            await asyncio.sleep(0)
        self.tell()

    def tell(self) -> None:
        for name in self._untold:
            self._index.sent(name, self._keys.all(), self._of.clock())
        self._told, self._untold = self._untold, set()

    def prefilled(self, reply: PrefillReply) -> None:
        prefill_id = self._route.prefill_id
        if prefill_id is not None and reply.status is CallStatus.OK:
            self._settle("prefill", prefill_id, self._route.cached_tokens, reply.num_cached)

    def ended(self, call: asyncio.Task[GenerateReply]) -> None:
        is_ok = not call.cancelled() and call.exception() is None and call.result().status is CallStatus.OK
        self.generated(call.result().num_cached if is_ok else None)

    def generated(self, num_found: int | None) -> None:
        decode_id = self._route.decode_id
        if num_found is None:
            self._never_mind(decode_id)
        else:
            self._settle("decode", decode_id, self._route.kept_tokens, num_found)

    def close(self) -> None:
        if self._route.prefill_id is not None:
            self._never_mind(self._route.prefill_id)

    def _never_mind(self, replica_id: str) -> None:
        self._untold.discard(replica_id)
        if replica_id in self._told:
            self._told.discard(replica_id)
            self._index.unsent(replica_id, self._keys.all())

    def _settle(self, pool: str, replica_id: str, num_expected: int, num_found: int) -> None:
        """It has the prompt now, and had so many tokens of it before."""
        self._untold.discard(replica_id)
        self._told.discard(replica_id)
        prompt_len, block_size = self._spec.prompt_len, self._of.block_size
        num_found = min(num_found, prompt_len - 1)
        self._of.tell_found(pool, num_expected, num_found)
        num_believed = self._believed.get(replica_id, 0)
        is_all = num_found >= tokens_of(num_believed, prompt_len, block_size)
        num_pieces = num_believed if is_all else pieces_of(num_found, block_size)
        self._index.answered(replica_id, self._keys.all(), num_believed, num_pieces, self._num_uses)
