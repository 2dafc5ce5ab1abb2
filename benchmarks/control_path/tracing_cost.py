"""`python -m benchmarks.control_path.tracing_cost`: what OpenTelemetry traces cost a request.

The real ingress and router over stub replicas, once without and once with traces of all requests to a collector that
answers at once; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.control_path.latency import sequential_latency
from benchmarks.control_path.process_cpu import cpu_of
from benchmarks.control_path.serve_cluster import serve_cluster
from benchmarks.control_path.wiring import build_stub_app, stub_config
from cluster.config.tracing import TracingConfig
from cluster.load.client import Target
from cluster.load.machine import describe_machine, machine_line

_TURNS = 3


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.control_path.tracing_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of 50 requests each, in each of the turns")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    with collector() as (endpoint, received):
        result = measure(endpoint, options.rounds)
    machine = describe_machine()
    print(machine_line(machine))
    for name, row in result.items():
        print(
            f"traces {name:<3} p50 {row['p50_ms']:.2f} ms  p90 {row['p90_ms']:.2f} ms  p99 {row['p99_ms']:.2f} ms  "
            f"ingress {row['ingress_cpu_ms']:.2f} ms CPU a request ({_TURNS} x {row['requests']:.0f} requests)"
        )
    print(f"the collector got {sum(received):,} bytes in {len(received)} exports")
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "tracing_cost": result}, indent=1) + "\n")
    return 0 if received else 1


def measure(endpoint: str, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Latency and CPU time of the ingress, by whether requests are traced: means over turns. Blocks for minutes."""
    off = stub_config()
    configs = {"off": off, "on": off.model_copy(update={"tracing": TracingConfig(endpoint=endpoint)})}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    with serve_cluster() as cluster:
        for _ in range(_TURNS):
            for name, config in configs.items():
                target = Target(f"{cluster.url}/{name}", config.model.name)
                with cluster.application(build_stub_app(config, 0.0, 1), name, target):
                    turns[name].append(_turn(name, target, num_rounds))
    return {name: {key: sum(row[key] for row in rows) / _TURNS for key in rows[0]} for name, rows in turns.items()}


def _turn(name: str, target: Target, num_rounds: int) -> dict[str, Any]:
    sequential_latency({name: target}, 2)  # warm
    before_s = cpu_of(f"{name}:ingress")
    row = sequential_latency({name: target}, num_rounds)[name]
    used_s = cpu_of(f"{name}:ingress") - before_s
    num_sent = row["requests"] * (num_rounds + 1) / num_rounds  # its first round is not in the latencies
    return {**row, "ingress_cpu_ms": 1000 * used_s / num_sent}


@contextmanager
def collector() -> Iterator[tuple[str, list[int]]]:
    """The base URL of an OTLP/HTTP collector on loopback, and the size of each export that it gets."""
    received: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # http.server looks for this name
            received.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
