"""A local Ray with Serve for one benchmark, and applications on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.real_server import free_port
from cluster.load.client import Client, OutgoingRequest, Target

_LOOPBACK = "127.0.0.1"
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
_START_TIMEOUT_S = 60.0


class ServeCluster:
    """Applications are reached under `url`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://{_LOOPBACK}:{port}"

    @contextmanager
    def application(self, app: Any, name: str, target: Target) -> Iterator[None]:
        """Deployed until the context ends; `target` answers when it begins."""
        from ray import serve

        serve.run(app, name=name, route_prefix=f"/{name}", logging_config=_QUIET)
        asyncio.run(_wait_until_answered(target))
        try:
            yield
        finally:
            serve.delete(name)


@contextmanager
def serve_cluster() -> Iterator[ServeCluster]:
    """Environment variables of Serve must be set before. Takes about ten seconds."""
    import ray
    from ray import serve

    ray.init(
        num_cpus=8,  # logical
        include_dashboard=False,
        object_store_memory=100_000_000,
        _node_ip_address=_LOOPBACK,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = free_port()
    try:
        serve.start(http_options={"host": _LOOPBACK, "port": port}, logging_config=_QUIET)
        yield ServeCluster(port)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


async def _wait_until_answered(target: Target) -> None:
    """A proxy learns of an application some time after Serve calls it running. Raises TimeoutError."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    client = Client(target, timeout_s=10.0)
    while True:
        record = await client.send(probe())
        if record.is_ok:
            break
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{target.url} does not answer: {record.error}")
        await asyncio.sleep(0.2)
    client.close()


def probe() -> OutgoingRequest:
    """The smallest request that goes the whole way: the first token comes from prefill, the second from decode."""
    return OutgoingRequest(0, time.monotonic(), [TOKEN_ID] * 16, 16, max_tokens=2, stream=False, options=GREEDY)


# A token with text of its own in the bundled vocabulary; the stub engine repeats its prompt's first token.
TOKEN_ID = 260
GREEDY = {"temperature": 0, "ignore_eos": True}
