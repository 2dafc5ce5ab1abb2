"""The server that faults are put into: 2P2D on this machine's CPU, with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.running_server import RunningServer, run_server

# Half of all streams fit into each decode replica: nobody waits for memory, so that pauses are those of faults.
_CHANGES = {
    "model.max_model_len": 512,
    "pools.prefill.max_batch_tokens": 64,  # longer prompts take several steps
    "pools.prefill.kv_capacity_tokens": 8192,
    "pools.decode.kv_capacity_tokens": 16384,
    "lifecycle.drain_timeout_s": 60.0,
    "routing.local_by_cost": False,  # so that KV is moved, however fast this small model computes it again
}


@contextmanager
def chaos_server(folder: Path, proxy: str = "serve", **changes: object) -> Iterator[RunningServer]:
    """Running within. changes: further ones, dots of keys as double underscores."""
    more = {key.replace("__", "."): value for key, value in changes.items()}
    with run_server("local-2p2d.yaml", folder, {**_CHANGES, "server.proxy": proxy, **more}) as server:
        yield server
