"""`splitserve serve`: a local Ray, the application on it, progress while it starts, then one block of lines."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from cluster.config.root import Config
from cluster.http.serve_proxy import local_environment, proxy_here
from cluster.http.server_address import base_url, check_address
from cluster.lifecycle.shutdown import StopSignals, wait_for_streams, without_last_words
from cluster.serving.serve_config import APP_NAME, serve_config, serve_logging
from cluster.user_error import UserError

_LOOPBACK = "127.0.0.1"
_ANSWER_TIMEOUT_S = 10.0
_PORT_PATIENCE_S = 5.0


def run_server(config: Config) -> int:
    """Serve until SIGINT or SIGTERM, then drain; returns the exit code.

    Raises UserError when the application can't start, KeyboardInterrupt at a second signal.
    """
    check_address(config.server.host, config.server.port, _PORT_PATIENCE_S)
    with local_environment(config.server.proxy, os.environ) as variables:
        _set_environment(config, variables)
        return _serve(config)


def _serve(config: Config) -> int:
    started_s = time.monotonic()
    try:
        _say("starting Ray")
        _start_ray_patiently(config)
        signals = StopSignals()
        signals.install()
        _say("starting replicas: each loads the weights, allocates its KV pool and warms up")
        description = _deploy(config, signals.requested)
        if description is not None:
            _say(f"ready after {time.monotonic() - started_s:.0f} s")
            sys.stdout.write(ready_lines(config, description) + "\n")
            sys.stdout.flush()
            signals.requested.wait()
        _say("stopping")
        if description is not None:
            _drain(config)
        with without_last_words():
            _stop_serve()
    except KeyboardInterrupt:
        _say("stopped at once: requests that were not over are cut")
        raise
    finally:
        with without_last_words():
            _stop_ray()
    return 0


def _start_ray_patiently(config: Config) -> None:
    """On a busy machine Ray's own patience may be too short: try twice. Raises UserError."""
    for is_last in (False, True):
        try:
            _start_ray(config)
            return
        except Exception as error:
            _stop_ray()
            cause = getattr(error, "cause", None) or error  # Ray's own line names an actor only
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            if is_last:
                raise UserError(
                    f"Ray did not start: {reason}\nIs the machine very busy, or out of memory or disk space? "
                    "Ray's logs are in /tmp/ray/session_latest/logs."
                ) from error
            _say(f"Ray did not start ({reason}); trying once more")


def _set_environment(config: Config, variables: Mapping[str, str]) -> None:
    """Before Ray is imported: it reads these once. Logs of replicas come through to this terminal, each line once.

    variables: what the config decides; the others are defaults.
    """
    if config.server.proxy == "serve" and proxy_here(os.environ) == "haproxy":
        _say("RAY_SERVE_ENABLE_HA_PROXY is not heeded: set server.proxy: haproxy in the config")
    if os.environ.pop("RAY_ADDRESS", None):
        _say("RAY_ADDRESS is not heeded: serve starts a Ray of its own; for a cluster: splitserve deploy, serve deploy")
    os.environ.update(variables)
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "NIXL_LOG_LEVEL": "WARN",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.http.proxy_headers:middlewares",
        # A first start converts or compiles for a minute and says so; Serve would warn of a slow one after half of it.
        "RAY_SERVE_SLOW_STARTUP_WARNING_S": "300",
        # A proxy that has died is replaced after three checks: with Serve's 10 s nobody listens for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    }.items():
        os.environ.setdefault(name, value)


def _start_ray(config: Config) -> None:
    import ray
    from ray import serve

    ray.init(
        address="local",  # else it would join a Ray that runs here already, of whatever version
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
            description: dict[str, list[dict[str, Any]]] = _ingresses().describe.remote().result(timeout_s=30)
            return description
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise UserError(f"the application did not start: {_last_line(status)}")
    return None


def _run_application(config: Config) -> None:
    from ray import serve
    from ray.serve.api import RunTarget
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from cluster.serving.app import build_app

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


def _ingresses() -> Any:
    """A handle. This process has no event loop, in which Serve's tuned modes would have the handle's work done."""
    from ray import serve

    handle: Any = serve.get_app_handle(APP_NAME)
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    return handle


def _drain(config: Config) -> None:
    """Every ingress refuses new requests, and its streams end. Blocks, at most for the drain's time."""
    handle = _ingresses()

    def ask(method: str) -> list[Any]:
        # An ingress that has died has no streams any more.
        results = handle.broadcast(method).results(timeout_s=_ANSWER_TIMEOUT_S, return_exceptions=True)
        return [result for result in results if not isinstance(result, BaseException)]

    try:
        ask("begin_drain")
        num_left = wait_for_streams(lambda: sum(ask("num_open")), config.lifecycle.drain_timeout_s, _say)
    except Exception as error:
        _say(f"the ingresses can't be asked, streams may be cut: {type(error).__name__}")
        return
    if num_left:
        _say(f"{num_left} requests are cut: lifecycle.drain_timeout_s is over")


def _stop_serve() -> None:
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def ready_lines(config: Config, description: dict[str, list[dict[str, Any]]]) -> str:
    """What a user needs to know now. description: metadata of each replica, by pool."""
    url = base_url(config.server.host, config.server.port)
    decode = description["decode"]
    capacity = sum(replica["num_blocks"] * replica["block_size"] for replica in decode)
    replicas = ", ".join(f"{len(table)} {pool}" for pool, table in sorted(description.items(), reverse=True))
    # Pools that scale may begin with none; every replica of either knows what a token takes.
    per_token = {replica["kv_bytes_per_token"] for table in description.values() for replica in table}
    kv = f"{per_token.pop():,} bytes a token" if per_token else "known when the first replica runs"
    full = capacity // config.model.max_model_len
    room = f"{capacity:,} tokens in the decode pool: {full} requests of full length"
    return "\n".join(
        [
            "",
            f"  URL        {url}/v1",
            f"  model      {config.model.name} ({config.model.dtype})",
            f"  replicas   {config.ingress.first_replicas} ingress, {replicas}",
            f"  KV cache   {kv}",
            f"  capacity   {room if decode else 'none yet: the first request starts a decode replica'}",
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
