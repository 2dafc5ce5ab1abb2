"""`splitserve serve`: a local Ray, the application on it, progress while it starts, then one block of lines and what of
the log concerns people; all else that is said goes into a file."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from cluster.config.root import Config
from cluster.http.serve_proxy import local_environment
from cluster.http.server_address import check_address
from cluster.lifecycle.shutdown import StopRequest, StopSignals, num_open_of, wait_for_streams
from cluster.serving import local_ray
from cluster.serving.ready_lines import Description, ready_lines
from cluster.serving.serve_config import APP_NAME
from cluster.terminal.log_file import LogFile
from cluster.terminal.replica_log import ReplicaLog
from cluster.terminal.terminal import Terminal
from cluster.user_error import UserError

_ANSWER_TIMEOUT_S = 10.0
_PORT_PATIENCE_S = 5.0
_POLL_S = 0.2
# Ray's processes give up 60 s after their GCS has gone (gcs_rpc_server_reconnect_timeout_s), this one among them.
_WITHOUT_RAY_S = 40.0


def run_server(config: Config) -> int:
    """Serve until SIGINT or SIGTERM, then drain; returns the exit code.

    Raises UserError when the application can't start, KeyboardInterrupt at a second signal.
    """
    check_address(config.server.host, config.server.port, _PORT_PATIENCE_S)
    file = _log_file(config)
    try:
        with file.instead_of_the_terminal() as (out, err):
            terminal = Terminal(config.logging.format == "json", out, err)
            with local_environment(config.server.proxy, os.environ) as variables:
                local_ray.set_environment(config, variables, terminal.say)
                terminal.say(f"log of Ray and replicas: {file.path}")
                return _serve(config, terminal, file)
    except UserError as error:
        raise UserError(f"{error}\nThe log has more: {file.path}") from error
    finally:
        file.close()


def _log_file(config: Config) -> LogFile:
    """Raises UserError where it is configured and can't be written."""
    path = config.logging.file
    name = f"serve-{config.server.port}.log"
    try:
        return LogFile(path or config.model.cache_dir / "logs" / name)
    except OSError as error:
        if path is not None:
            raise UserError(f"logging.file: {path} can't be written: {error.strerror}") from error
        return LogFile(Path(tempfile.mkdtemp(prefix="splitserve-")) / name)  # the home may be read-only


def _serve(config: Config, terminal: Terminal, file: LogFile) -> int:
    started_s = time.monotonic()
    is_json = config.logging.format == "json"
    # Replicas speak JSON to this process, which makes text of it where text is wanted.
    config = config.model_copy(update={"logging": config.logging.model_copy(update={"format": "json"})})
    is_ready = False
    signals = StopSignals()
    terminal.begin_steps()
    try:
        _start_ray(config, terminal)
        signals.install()
        local_ray.take_log(ReplicaLog(file, terminal, is_json).take)
        with _starting_replicas(terminal):
            description = _deploy(config, signals.requested)
        terminal.end_steps()
        if description is not None:
            is_ready = True
            terminal.say(f"ready after {time.monotonic() - started_s:.0f} s", "ready")
            terminal.block(ready_lines(config, description))
            _wait_for_the_end(terminal, signals.requested)
        terminal.say("stopping", "stopping")
        if description is not None:
            _drain(terminal, config.lifecycle.drain_timeout_s)
        local_ray.stop_serve()
    except KeyboardInterrupt:
        terminal.end_steps()
        terminal.say(f"stopped at once{': requests that were not over are cut' if is_ready else ''}", "stopped")
        raise
    finally:
        signals.ignore()
        terminal.end_steps()
        local_ray.stop_ray()
    terminal.say("stopped", "stopped")
    return 0


def _start_ray(config: Config, terminal: Terminal) -> None:
    steps = terminal.steps_of_start
    if steps is None:
        local_ray.start_ray_patiently(config, terminal.say)
        return
    with steps.step("starting Ray"):
        local_ray.start_ray_patiently(config, terminal.say)


def _starting_replicas(terminal: Terminal) -> AbstractContextManager[object]:
    """Says that they start. Their processes take a while before they have anything to say: a row moves meanwhile."""
    message = "starting replicas: each loads the weights, allocates its KV pool and warms up"
    steps = terminal.steps_of_start
    if steps is not None and steps.is_lively:
        return steps.step(message)
    terminal.say(message, "starting")
    return nullcontext()


def _deploy(config: Config, stop: StopRequest) -> Description | None:
    """Run the application and describe it; None when interrupted meanwhile. Raises UserError."""
    from ray import serve

    local_ray.run_application(config)
    while not stop.wait(_POLL_S):
        status = serve.status().applications.get(APP_NAME)
        if status is None:
            continue
        if status.status == "RUNNING":
            description: Description = local_ray.ingresses().describe.remote().result(timeout_s=30)
            return description
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise UserError(f"the application did not start: {_last_line(status)}")
    return None


def _last_line(status: Any) -> str:
    """The error of the first deployment that failed, without the traceback: that is in the log."""
    for name, deployment in status.deployments.items():
        lines = [line for line in deployment.message.splitlines() if line.strip()]
        if "fail" in deployment.status.lower() and lines:
            return f"{name}: {lines[-1].strip()}"
    return str(status.message)


def _wait_for_the_end(terminal: Terminal, stop: StopRequest) -> None:
    """Until a signal asks for it. Raises UserError when Ray itself has died: what runs goes on for a while, but nobody
    could replace it, nor stop it in order. So streams may end first, while new requests are refused.
    """
    while not stop.wait(_POLL_S):
        if (lost := local_ray.lost_process()) is None:
            continue
        local_ray.stop_listening()
        terminal.say(f"Ray's {lost} has died: nothing can be started any more, so the server stops", "ray_lost")
        if lost != "raylet":  # with that one all replicas end
            _drain(terminal, _WITHOUT_RAY_S, "the time that Ray leaves for it")
        local_ray.kill_ray()
        raise UserError(
            f"Ray's {lost} has died (killed, or out of memory?), and the server with it: start it again. "
            "docs/reliability.md says what goes on without it, and what does not"
        )


def _drain(terminal: Terminal, timeout_s: float, bound: str = "lifecycle.drain_timeout_s") -> None:
    """Every ingress refuses new requests, and its streams end. Blocks, at most for so long. bound: what says so."""
    num_left = wait_for_streams(_ask_ingresses, timeout_s, terminal.say)
    if num_left is None:
        terminal.say(f"an ingress did not answer until {bound} was over: requests may be cut")
    elif num_left:
        terminal.say(f"{num_left} requests are cut: {bound} is over")


def _ask_ingresses() -> int | None:
    """Each takes nothing new from now on; how many requests are not over, None if nobody knows. Blocks for seconds."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        asked = local_ray.ingresses().broadcast("begin_drain")
        return num_open_of(asked.results(timeout_s=_ANSWER_TIMEOUT_S, return_exceptions=True))
    except DeploymentUnavailableError:  # there is no ingress any more
        return 0
    except Exception:  # not in time, or Serve itself is not there just now
        return None
