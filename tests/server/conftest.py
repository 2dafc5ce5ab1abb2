"""The servers that several files of tests share. One runs at a time: each takes its share of two cores, idle or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.running_server import RunningServer, run_server

API_KEY = "sk-test-0123456789"
OTHER_KEYS = ("sk-of-a-stranger-01", "sk-of-a-stranger-02")
CONTEXT = 256
SMALL_CAPACITY_TOKENS = 640
NUM_QUEUED = 16
_SHARED = ("api_server", "small_server")


class OneServer:
    """Asking for another server stops the one that runs."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._running: tuple[str, RunningServer] | None = None
        self._stack = ExitStack()

    def get(
        self,
        name: str,
        config_file: str,
        changes: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
    ) -> RunningServer:
        """A shipped config, changed by dotted keys. files: a key to the text of the file that it shall name."""
        if self._running is None or self._running[0] != name:
            self.stop()
            folder = self._folders.mktemp(name)
            changes = dict(changes or {})
            for key, text in (files or {}).items():
                (folder / key).write_text(text)
                changes[key] = str(folder / key)
            self._running = (name, self._stack.enter_context(run_server(config_file, folder, changes)))
        return self._running[1]

    def stop(self) -> None:
        self._running = None
        self._stack.close()


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneServer]:
    server = OneServer(tmp_path_factory)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def api_server(one_server: OneServer) -> RunningServer:
    """API keys on, a short context."""
    changes = {
        "model.max_model_len": CONTEXT,
        "limits.max_body_bytes": 2_000_000,
        "limits.body_timeout_s": 3.0,
    }
    return one_server.get("api", "local.yaml", changes, {"auth.api_keys_file": "\n".join((API_KEY, *OTHER_KEYS))})


@pytest.fixture(scope="module")
def small_server(one_server: OneServer) -> RunningServer:
    """Memory for a few requests, a short queue, prompts in small chunks, and leases that no test outlives. Whatever is
    measured of the machine, prompts are handed over: tests hold each phase of that."""
    changes = {
        "model.max_model_len": 512,
        "pools.decode.kv_capacity_tokens": SMALL_CAPACITY_TOKENS,
        "pools.prefill.kv_capacity_tokens": 512,
        "pools.prefill.max_batch_tokens": 64,
        "ingress.queue_timeout_s": 300.0,
        "ingress.max_queued_requests": NUM_QUEUED,
        "transfer.lease_s": 60.0,
        "routing.local_by_cost": False,
    }
    return one_server.get("small", "local.yaml", changes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that share a server follow one another."""
    items.sort(key=lambda item: [name in getattr(item, "fixturenames", ()) for name in _SHARED], reverse=True)
