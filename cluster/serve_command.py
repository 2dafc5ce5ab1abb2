"""`splitserve serve`: a local Ray, the application on it, progress while it starts, then one block of lines."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from cluster.config import Config
from cluster.serve_config import APP_NAME, serve_config, serve_logging
from cluster.user_error import UserError

_LOOPBACK = "127.0.0.1"


def run_server(config: Config) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises UserError when the application can't start."""
    started_s = time.monotonic()
    try:
        _say("starting Ray")
        _start_ray(config)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets handlers of its own
            signal.signal(number, lambda *_: stop.set())
        _say("starting replicas: each loads the weights, allocates its KV pool and warms up")
        description = _deploy(config, stop)
        if description is not None:
            _say(f"ready after {time.monotonic() - started_s:.0f} s")
            sys.stdout.write(ready_lines(config, description) + "\n")
            sys.stdout.flush()
            stop.wait()
        _say("stopping")
    finally:
        _stop_ray()
    return 0


def _start_ray(config: Config) -> None:
    # Before Ray is imported: it reads these once. Logs of replicas come through to this terminal, each line once.
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "NIXL_LOG_LEVEL": "WARN",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.proxy_headers:middlewares",
    }.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    ray.init(
        num_cpus=config.ray_num_cpus,
        include_dashboard=config.ray.include_dashboard,
        object_store_memory=config.ray.object_store_memory_bytes,
        _node_ip_address=_LOOPBACK,
        logging_level=logging.WARNING,
        log_to_driver=True,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http_options = {"host": config.server.host, "port": config.server.port}
    serve.start(http_options=http_options, logging_config=serve_logging(config))


def _deploy(config: Config, stop: threading.Event) -> dict[str, list[dict[str, Any]]] | None:
    """Run the application and describe it; None when interrupted meanwhile. Raises UserError."""
    from ray import serve

    _run_application(config)
    while not stop.wait(0.2):
        status = serve.status().applications.get(APP_NAME)
        if status is None:
            continue
        if status.status == "RUNNING":
            handle = serve.get_app_handle(APP_NAME)
            description: dict[str, list[dict[str, Any]]] = handle.describe.remote().result(timeout_s=30)
            return description
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise UserError(f"the application did not start: {_last_line(status)}")
    return None


def _run_application(config: Config) -> None:
    from ray import serve
    from ray.serve.api import RunTarget
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from cluster.app import build_app

    if config.autoscales:
        # The only way to a policy for a whole application is a config file: the one that `splitserve deploy` writes.
        document = serve_config(config.model_dump(mode="json", exclude_unset=True), config)
        client = _get_global_client()
        assert client is not None, "serve.start has made it"
        client.deploy_apps(ServeDeploySchema.model_validate(document))
        return
    target = RunTarget(build_app(config), name=APP_NAME, route_prefix="/", logging_config=serve_logging(config))
    serve.run_many([target], wait_for_applications_running=False)


def _last_line(status: Any) -> str:
    """The error of the first deployment that failed, without the traceback: that is in the log above."""
    for name, deployment in status.deployments.items():
        lines = [line for line in deployment.message.splitlines() if line.strip()]
        if "fail" in deployment.status.lower() and lines:
            return f"{name}: {lines[-1].strip()}"
    return str(status.message)


def _stop_ray() -> None:
    import ray
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


def ready_lines(config: Config, description: dict[str, list[dict[str, Any]]]) -> str:
    """What a user needs to know now. description: metadata of each replica, by pool."""
    url = f"http://{config.server.host}:{config.server.port}"
    decode = description["decode"]
    capacity = sum(replica["num_blocks"] * replica["block_size"] for replica in decode)
    per_token = decode[0]["kv_bytes_per_token"] if decode else 0
    replicas = ", ".join(f"{len(table)} {pool}" for pool, table in sorted(description.items(), reverse=True))
    full = capacity // config.model.max_model_len
    return "\n".join(
        [
            "",
            f"  URL        {url}/v1",
            f"  model      {config.model.name} ({config.model.dtype})",
            f"  replicas   {config.ingress.first_replicas} ingress, {replicas}",
            f"  KV cache   {per_token:,} bytes a token",
            f"  capacity   {capacity:,} tokens in the decode pool: {full} requests of full length",
            "",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f'    -d \'{{"model": "{config.model.name}", "max_tokens": 64, "temperature": 0,',
            '         "messages": [{"role": "user", "content": "What is the capital of France?"}]}\'',
            "",
        ]
    )


def _say(message: str) -> None:
    sys.stderr.write(f"splitserve: {message}\n")
    sys.stderr.flush()
