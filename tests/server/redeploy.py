"""Change a running server, as `serve deploy` would: python -m tests.server.redeploy ADDRESS CONFIG --scale POOL=N
--roll POOL. ADDRESS: of its Ray; others may run on this machine.

A process of its own, so that no Ray is left in the test's. Deployments that are not named keep their version: Serve
leaves them alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.api import RunTarget

from cluster.config.file import load_config
from cluster.serving.app import build_app
from cluster.serving.serve_config import serve_logging


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("config", type=Path)
    parser.add_argument("--scale", action="append", default=[], metavar="POOL=N")
    parser.add_argument("--roll", action="append", default=[], metavar="POOL")
    arguments = parser.parse_args()
    scales = dict(scale.split("=") for scale in arguments.scale)
    config = load_config(arguments.config, {f"pools.{pool}.replicas": int(num) for pool, num in scales.items()})
    ray.init(address=arguments.address, _node_ip_address="127.0.0.1", log_to_driver=False)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    running = ray.get(controller.list_deployments_internal.remote())
    versions = {key.name: info.version for key, (info, _) in running.items()}
    app = build_app(config)
    for deployment in deployments_of(app):
        suffix = "-rolled" if deployment.name in arguments.roll else ""
        deployment._version = versions[deployment.name] + suffix
    # With the logging of before: another one has Serve take each replica off the tables for a moment.
    target = RunTarget(app, name="splitserve", route_prefix="/", logging_config=serve_logging(config))
    serve.run_many([target], wait_for_applications_running=False)


def deployments_of(app: Any) -> Iterator[Any]:
    """The deployments of a bound application."""
    bound = app._bound_deployment
    yield bound
    for argument in bound.init_args:
        if hasattr(argument, "_bound_deployment"):
            yield from deployments_of(argument)


if __name__ == "__main__":
    main()
