"""`python -m benchmarks.control_path.prefix_cost`: CPU time that prefix caches cost a router for each prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from cluster.policies.routing_policy import Need, RoutingRules
from cluster.routing.pairing import choose_route
from cluster.routing.pool_view import PoolView
from cluster.routing.prefix_index import PrefixIndex
from cluster.routing.prompt_keys import PromptKeys
from replicas.messages import EngineLoad, TransferPeer
from replicas.recent_part import KEYS_IN_PART
from scheduler.prefix_hash import chain_start

_PROMPT = tuple(range(8_192))
_RULES = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)


def main() -> int:
    start = chain_start("f")

    def hashed() -> None:
        PromptKeys(start, _PROMPT, 16).all()

    print(
        f"hashing 8,192 tokens: {_least_us(hashed, 200):.0f} us; of an unknown prompt before it is routed, 256 tokens:"
    )
    index, keys = PrefixIndex(), PromptKeys(start, _PROMPT, 16)

    def unknown() -> None:
        index.expected(PromptKeys(start, _PROMPT, 16), 0.0)

    print(f"  {_least_us(unknown, 1_000):.1f} us, the look-up included")
    for num_replicas in (4, 16, 1_000):
        names = [f"decode-{number}" for number in range(num_replicas)]
        index.present([{name: _metadata(name) for name in names}])
        for name in names:
            index.holds(name, keys.all())
        many_us = _least_us(lambda: index.expected(keys, 0.0), 100)
        route_us = [_route_us(num_replicas, cached) for cached in (0, 4_096)]
        print(
            f"{num_replicas} replicas that have all of it: look-up {many_us:.0f} us; routing with "
            f"{min(num_replicas, 16)} prefill replicas {route_us[0]:.0f} us, where all decode replicas have a half "
            f"{route_us[1]:.0f} us"
        )
    part = list(range(KEYS_IN_PART))
    fresh = PrefixIndex()
    fresh.present([{"a": _metadata("a")}])
    part_us = _least_us(lambda: (fresh.forget("a"), fresh.holds("a", part)), 50)
    print(f"a pulse's part of {KEYS_IN_PART} keys, all of them new: {part_us:.0f} us")
    return 0


def _route_us(num_replicas: int, cached: int) -> float:
    decodes = {f"decode-{number}": _metadata(f"decode-{number}") for number in range(num_replicas)}
    prefills = {f"prefill-{number}": _metadata(f"prefill-{number}") for number in range(min(num_replicas, 16))}
    view = PoolView(lambda: decodes, lambda: prefills)
    for name in (*decodes, *prefills):
        view.heard_load(name, EngineLoad(12, 0, 4_096, 9_000, 20_000, 0.006, 43_000.0, (9_500, 10_000, 15_000, 20_000)))
    held = dict.fromkeys(decodes, cached) if cached else {}
    need = Need(8_192, 128, 1, 16, cached=held)

    def route() -> None:
        choose_route(need, view.decode_candidates(), view.prefill_candidates(), _RULES, pairs=view.pairs.of)

    return _least_us(route, max(3, 2_000 // num_replicas))


def _least_us(work: Callable[[], Any], repeats: int) -> float:
    """The least of some averages. Blocks."""
    least_s = 1e9
    for _ in range(7):
        began_s = time.thread_time()
        for _ in range(repeats):
            work()
        least_s = min(least_s, (time.thread_time() - began_s) / repeats)
    return 1e6 * least_s


def _metadata(name: str) -> dict[str, Any]:
    peer = TransferPeer(name, "e", f"agent-{name}", b"", "f", 20_000, 2 * 1024**2)
    return {"num_blocks": 20_000, "node_id": "node", "peer": peer.to_metadata()}


if __name__ == "__main__":
    sys.exit(main())
