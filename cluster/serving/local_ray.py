"""The Ray of `splitserve serve`: on this machine, for as long as the command runs, and what it says."""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cluster.config.root import Config
from cluster.http.serve_proxy import proxy_here
from cluster.serving.child_processes import descendants
from cluster.serving.serve_config import APP_NAME, serve_config, serve_logging
from cluster.user_error import UserError

_LOOPBACK = "127.0.0.1"
# What Ray can't do without: who knows of everybody (it keeps that in its memory), and whose children all replicas are.
_VITAL = ("gcs_server", "raylet")


def set_environment(config: Config, variables: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Before Ray is imported: it reads these once. variables: what the config decides; the others are defaults."""
    if config.server.proxy == "serve" and proxy_here(os.environ) == "haproxy":
        say("RAY_SERVE_ENABLE_HA_PROXY is not heeded: set server.proxy: haproxy in the config")
    if os.environ.pop("RAY_ADDRESS", None):
        say("RAY_ADDRESS is not heeded: serve starts a Ray of its own; for a cluster: splitserve deploy, serve deploy")
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


def start_ray_patiently(config: Config, say: Callable[[str], None]) -> None:
    """On a busy machine Ray's own patience may be too short: try twice. Raises UserError."""
    for is_last in (False, True):
        try:
            start_ray(config)
            return
        except Exception as error:
            stop_ray()
            cause = getattr(error, "cause", None) or error  # Ray's own line names an actor only
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            if is_last:
                raise UserError(
                    f"Ray did not start: {reason}\nIs the machine very busy, or out of memory or disk space? "
                    "Ray's logs are in /tmp/ray/session_latest/logs."
                ) from error
            say(f"Ray did not start ({reason}); trying once more")


def start_ray(config: Config) -> None:
    """Ray and Serve, without an application. Blocks for seconds."""
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


def take_log(take: Callable[[Mapping[str, Any]], None]) -> None:
    """From now on `take` gets all that the processes of this Ray say, instead of stdout and stderr: some lines of one
    process at a time, with its name. On a thread of Ray's. Ray has started."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("splitserve", take)


def run_application(config: Config) -> None:
    """Does not wait until it runs."""
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


def ingresses() -> Any:
    """A handle. This process has no event loop, in which Serve's tuned modes would have the handle's work done."""
    from ray import serve

    handle: Any = serve.get_app_handle(APP_NAME)
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    return handle


def lost_process() -> str | None:
    """Which of the processes that this Ray can't do without has died; None: none. After it has started."""
    from ray._private import worker

    node: Any = worker._global_node
    dead = {name for name, _ in node.dead_processes()}
    return next((name for name in _VITAL if name in dead), None)


def stop_listening() -> None:
    """To what replicas say. Without a GCS the threads that listen would take a whole core for asking in vain."""
    from ray._private import worker

    worker.global_worker.threads_stopped.set()


def kill_ray() -> None:
    """At once, with all that it has started. For one whose vital process has died: an orderly end would wait for that
    one, for as long as Ray's own patience lasts, and leave its agents behind."""
    import ray

    atexit.unregister(ray.shutdown)
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stop_serve() -> None:
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]


def stop_ray() -> None:
    import ray

    ray.shutdown()
