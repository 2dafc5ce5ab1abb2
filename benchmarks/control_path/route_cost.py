"""`python -m benchmarks.control_path.route_cost`: CPU time of one routing decision, without Ray and HTTP."""

from __future__ import annotations

import sys
import time
from typing import Any

from cluster.policies.routing_policy import Need, Route, RoutingRules
from cluster.routing.pairing import choose_route
from cluster.routing.pool_view import PoolView
from replicas.messages import EngineLoad, TransferPeer

_ROUNDS, _REPEATS = 15, 2_000
_NEED = Need(prompt_tokens=2_048, max_tokens=128, num_choices=1, block_size=16)


def main() -> int:
    for num_replicas in (1, 4, 16):
        costs_us = [measure_routes(num_replicas, is_heard) for is_heard in (False, True)]
        print(
            f"{num_replicas} + {num_replicas} replicas: {costs_us[0]:.1f} us a decision, "
            f"{costs_us[1]:.1f} where a frame and an answer have come since the last"
        )
    return 0


def measure_routes(num_replicas: int, is_heard: bool) -> float:
    """Microseconds of a decision, the least of some averages. is_heard: two replicas have told their load before each,
    which counts too. Blocks."""
    decodes = {f"decode-{index}": _metadata(f"decode-{index}") for index in range(num_replicas)}
    prefills = {f"prefill-{index}": _metadata(f"prefill-{index}") for index in range(num_replicas)}
    view = PoolView(lambda: decodes, lambda: prefills)
    rules = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)
    later, pair = (9_500, 10_000, 15_000, 20_000), {"read_source": "prefill-0", "read_bytes_per_s": 50e9}
    load = EngineLoad(12, 0, 4_096, 9_000, 20_000, 0.006, 43_000.0, later, 128, **pair)
    for name in (*decodes, *prefills):
        view.heard_load(name, load)
    for name in decodes:
        view.pairs.measured(name, [(prefill, 50e9) for prefill in prefills])
    least_s = 1.0
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        for _ in range(_REPEATS):
            if is_heard:
                view.heard_load("decode-0", load)
                view.heard_load("prefill-0", load)
            route = choose_route(_NEED, view.decode_candidates(), view.prefill_candidates(), rules, pairs=view.pairs.of)
        least_s = min(least_s, (time.thread_time() - began_s) / _REPEATS)
        assert isinstance(route, Route)
    return 1e6 * least_s


def _metadata(name: str) -> dict[str, Any]:
    peer = TransferPeer(name, "e", f"agent-{name}", b"", "", 20_000, 2 * 1024**2)
    return {"num_blocks": 20_000, "node_id": "node", "peer": peer.to_metadata()}


if __name__ == "__main__":
    sys.exit(main())
