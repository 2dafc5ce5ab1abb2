"""One server for all tests of the API: one prefill, one decode replica, API keys on, a short context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running_server import RunningServer, run_server

API_KEY = "sk-test-0123456789"
CONTEXT = 256


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("api")
    keys = folder / "keys.txt"
    keys.write_text(f"{API_KEY}\n")
    changes = {
        "model.max_model_len": CONTEXT,
        "auth.api_keys_file": str(keys),
        "limits.max_body_bytes": 2_000_000,
        "limits.body_timeout_s": 3.0,
    }
    with run_server("local.yaml", folder, changes) as server:
        yield server
