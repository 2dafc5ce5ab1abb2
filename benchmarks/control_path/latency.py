"""One request at a time, not streamed: what the path adds, beside what Serve alone takes for its HTTP and its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from benchmarks.control_path.serve_cluster import probe
from cluster.load.client import Client, Target
from cluster.load.report import percentile

_REQUESTS_A_ROUND = 50


def sequential_latency(targets: Mapping[str, Target], num_rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds by target. The targets take turns, so that a busy moment hits all of them. Blocks."""
    return asyncio.run(_sequential_latency(targets, num_rounds))


async def _sequential_latency(targets: Mapping[str, Target], num_rounds: int) -> dict[str, dict[str, Any]]:
    clients = {name: Client(target, timeout_s=30.0) for name, target in targets.items()}
    times_ms: dict[str, list[float]] = {name: [] for name in targets}
    for round_ in range(-1, num_rounds):  # the first is not counted
        for name, client in clients.items():
            for _ in range(_REQUESTS_A_ROUND):
                record = await client.send(probe())
                if not record.is_ok:
                    raise RuntimeError(f"{name}: {record.error}")
                if round_ >= 0:
                    times_ms[name].append(1000 * record.e2el_s)
    for client in clients.values():
        client.close()
    return {
        name: {
            "requests": len(values),
            "p50_ms": percentile(values, 50),
            "p90_ms": percentile(values, 90),
            "p99_ms": percentile(values, 99),
        }
        for name, values in times_ms.items()
    }
