"""`python -m benchmarks.control_path.one_mode FILE`: the benchmark with Serve's mode as the environment sets it.

A process of its own: Ray reads its variables once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.control_path.latency import sequential_latency
from benchmarks.control_path.serve_cluster import ServeCluster, serve_cluster
from benchmarks.control_path.streams import streamed_throughput
from benchmarks.control_path.wiring import build_floor_app, build_stub_app, stub_config
from cluster.load.client import Target

STEP_S = 0.007
# As in shared/serving-on-ray.md section 3.
NUM_DECODE = 2
_STREAMS = {64: 250, 256: 150}  # streams -> tokens of each


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.control_path.one_mode", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    with serve_cluster() as cluster:
        options.output.write_text(json.dumps(run_mode(cluster, options.short)))
    return 0


def run_mode(cluster: ServeCluster, short: bool) -> dict[str, Any]:
    """Every figure of one mode. Blocks for half a minute or more."""
    config = stub_config()

    def target(path: str) -> Target:
        return Target(f"{cluster.url}/{path}", config.model.name)

    rounds = 4 if short else 10
    with cluster.application(build_floor_app(STEP_S), "floor", target("floor/nop")):
        whole = target("whole")
        with cluster.application(build_stub_app(config, 0.0, 1), "whole", whole):
            floors = {"nop": target("floor/nop"), "nop and two calls": target("floor/calls")}
            latency = sequential_latency({**floors, "whole path": whole}, rounds)
        with cluster.application(build_stub_app(config, STEP_S, NUM_DECODE), "whole", whole):
            paths = {"floor": target("floor/stream"), "whole path": whole}
            streams = [
                row
                for num_streams, num_tokens in _STREAMS.items()
                for row in streamed_throughput(paths, num_streams, num_tokens, 1 if short else 3)
            ]
    return {"latency": latency, "streams": streams}


if __name__ == "__main__":
    sys.exit(main())
