"""A whole server over a transport made slow: no request fails, texts are the same, and the server says what is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.golden.golden_set import load_goldens
from tests.server.generate import golden_request, post, post_all
from tests.server.running_server import RunningServer, run_server

BYTES_PER_S = 2e6  # some 45 prompt tokens a second; computing makes several times as many


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_slow_transport_slows_requests_fails_none_and_is_told_of(tmp_path: Path) -> None:
    goldens = [golden for golden in load_goldens() if 30 <= len(golden.prompt_ids) <= 57][:8]
    changes = {"transfer.max_bytes_in_flight": 1024**2, "routing.local_by_cost": False}
    with run_server("local.yaml", tmp_path, changes) as server:
        (server.fault_dir / "slow.reads").write_text(f"{BYTES_PER_S:g}")
        started_s = time.monotonic()
        answers = post_all(server, [golden_request(golden) for golden in goldens], num_at_once=8)
        took_s = time.monotonic() - started_s
        for golden, (answer,) in zip(goldens, answers, strict=True):
            golden.check(answer.token_ids)
        assert (server.fault_dir / "did.slow.reads").exists()
        num_bytes = server.total("splitserve_kv_transfer_bytes_total")
        print(f"{num_bytes / 1e6:.1f} MB in {took_s:.1f} s")
        assert took_s > num_bytes / BYTES_PER_S
        assert server.total("splitserve_kv_transfers_total", result="ready") == len(goldens)
        assert server.total("splitserve_retries_total") == 0
        rate = server.total("splitserve_kv_transfer_rate_bytes_per_second")
        assert num_bytes / len(goldens) / took_s < rate < 1.4 * BYTES_PER_S, "a stall makes it slower"
        assert server.total("splitserve_kv_transfer_pairs", pace="tcp") == 1
        assert server.total("splitserve_slow_transfers") == 1
        ready = _readiness(server)
        assert ready["slowest_transfer"]["gb_per_s"] == pytest.approx(BYTES_PER_S / 1e9, abs=0.002)
        assert "to compute a prompt again would be faster" in ready["notes"][0]
        (server.fault_dir / "slow.reads").unlink()
        with server.client() as client:
            for golden in goldens[:2]:
                (answer,) = post(client, *golden_request(golden))
                golden.check(answer.token_ids)
        server.wait_for_baseline()
        log = server.log()
    assert "KV is read from" in log
    assert "to compute a prompt again would be faster" in log


def _readiness(server: RunningServer) -> dict[str, Any]:
    """Once the ingress has heard of it."""
    give_up_s = time.monotonic() + 120.0
    while True:
        with server.client() as client:
            found: dict[str, Any] = client.get("/health/ready").json()
        if "notes" in found:
            return found
        assert time.monotonic() < give_up_s, found
        time.sleep(0.2)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_with_a_slow_transport_decode_computes_what_is_quicker_there(tmp_path: Path) -> None:
    """Requests one after the other: the first may take the slow way, the others do not."""
    goldens = [golden for golden in load_goldens() if 30 <= len(golden.prompt_ids) <= 57][:6]
    with run_server("local.yaml", tmp_path, {"ingress.replicas": 1}) as server:
        (server.fault_dir / "slow.reads").write_text(f"{BYTES_PER_S / 4:g}")
        for golden in goldens:
            ((answer,),) = post_all(server, [golden_request(golden)], num_at_once=1)
            golden.check(answer.token_ids)
        assert (server.fault_dir / "did.slow.reads").exists()
        moved = server.total("splitserve_kv_transfers_total", result="ready")
        assert 1 <= moved <= 2
        assert server.total("splitserve_router_decisions_total", result="remote") == moved
        assert server.total("splitserve_router_decisions_total", result="local_slow_pair") == len(goldens) - moved
        server.wait_for_baseline()
        log = server.log()
    assert "decode computes prompts itself rather than read their KV from this replica" in log
