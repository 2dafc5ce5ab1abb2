"""SIGKILL of the replica that has a request, in each phase of its handoff, on a real server, and SIGSTOP in the phase
of which only silence tells: another one does it, and the text is the undisturbed one. Phases are held open by gates
(`testing.fault_dir`).
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.chaos.asked import all_asked
from tests.chaos.chaos_client import Stream, read_stream
from tests.chaos.golden_load import learn_undisturbed
from tests.chaos.judge import Judge
from tests.chaos.row_run import counts
from tests.chaos.served import chaos_server
from tests.server.processes import is_ready, kill, replicas, state_of, wait_until
from tests.server.running_server import RunningServer

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

HANDOFF_TIMEOUT_S = 600.0
PATIENCE_S = 300.0  # a replica starts in 20 s, on a machine with much else to do in 100
LIMITS = {"transfer__lease_s": 20.0, "transfer__handoff_timeout_s": HANDOFF_TIMEOUT_S}
# A prompt of several steps at prefill and of several blocks; and three choices.
GREEDY = max(
    (asked for asked in all_asked() if asked.golden), key=lambda asked: asked.golden and len(asked.golden.prompt_ids)
)
CHOICES = next(asked for asked in all_asked() if asked.kind == "choices")


@dataclass(frozen=True, slots=True)
class Phase:
    """gates: files of replicas/fault_points.py, and what is in them. reached: whether the request is in it now."""

    gates: dict[str, str]
    reached: Callable[[RunningServer], bool]


def _has(server: RunningServer, name: str, **labels: str) -> bool:
    return server.total(f"splitserve_{name}", **labels) > 0


PHASES = {
    "queued at decode": Phase({"hold.decode.admit": ""}, lambda s: _has(s, "requests_queued", pool="decode")),
    "queued at prefill": Phase({"hold.prefill.admit": ""}, lambda s: _has(s, "requests_queued", pool="prefill")),
    "in prefill": Phase({"hold.prefill.step": ""}, lambda s: _has(s, "kv_blocks", pool="prefill", state="active")),
    "before the pull": Phase(
        {"hold.send_handoff": ""}, lambda s: s.was_held("send_handoff") and _has(s, "kv_blocks", state="leased")
    ),
    "as the pull begins": Phase({"hold.start_read": ""}, lambda s: s.was_held("start_read")),
    "in the pull": Phase(
        {"slow.reads": "2e5"},
        # A replica says that its reads are slow before it has any.
        lambda s: (s.fault_dir / "did.slow.reads").exists() and _has(s, "kv_blocks", pool="prefill", state="leased"),
    ),
    "after the pull": Phase(
        {"hold.decode.step": ""},
        lambda s: (
            _has(s, "kv_blocks", pool="decode", state="active")
            and s.was_held("decode.step")
            and not _has(s, "kv_transfers_open")
        ),
    ),
}
# Who has nothing of the request yet, or no more: whichever is killed then, nothing comes of it.
WITHOUT = {("queued at decode", "prefill"), ("after the pull", "prefill")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with chaos_server(tmp_path_factory.mktemp("phases"), **LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def judge(server: RunningServer) -> Judge:
    return Judge(learn_undisturbed(server.url, [GREEDY, CHOICES]))


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("name", PHASES)
def test_another_one_does_it(server: RunningServer, judge: Judge, name: str, pool: str) -> None:
    asked = CHOICES if name in ("before the pull", "after the pull") else GREEDY
    before = counts(server)
    for gate, text in PHASES[name].gates.items():
        (server.fault_dir / gate).write_text(text)
    ended: list[Stream] = []
    salt = f"{name} {pool}"  # so that the prompt is computed, and its KV moved
    client = threading.Thread(target=lambda: ended.append(read_stream(server.url, asked, salt)))
    client.start()
    try:
        wait_until(lambda: PHASES[name].reached(server), PATIENCE_S)
        assert ended == []
        pid = (replicas if (name, pool) in WITHOUT else holders)(server, pool)[0]
        kill(pid)
        assert state_of(pid) in ("", "Z")
    finally:
        server.clear_faults()
    client.join(PATIENCE_S)
    (stream,) = ended
    assert (stream.error, judge.verdict(stream)) == (None, "right")
    wait_until(lambda: counts(server) == before and is_ready(server), PATIENCE_S)
    server.wait_for_baseline()


def test_one_that_stands_still_between_its_answer_and_its_handoff_is_given_up_in_seconds(
    server: RunningServer, judge: Judge
) -> None:
    """No call is open there, so that only its silence tells: not after as long as a handoff may take."""
    gate = server.fault_dir / "hold.send_handoff"
    gate.write_text("")
    ended: list[Stream] = []
    client = threading.Thread(target=lambda: ended.append(read_stream(server.url, GREEDY, "stands still")))
    client.start()
    pids: list[int] = []
    try:
        wait_until(lambda: PHASES["before the pull"].reached(server), PATIENCE_S)
        (pid,) = pids = holders(server, "prefill")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", PATIENCE_S)
        gate.unlink()  # for the other one
        client.join(HANDOFF_TIMEOUT_S / 2)
        assert state_of(pid) == "T"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        server.clear_faults()
    (stream,) = ended
    assert (stream.error, judge.verdict(stream)) == (None, "right")
    wait_until(lambda: is_ready(server), PATIENCE_S)
    server.wait_for_baseline()


def holders(server: RunningServer, pool: str) -> list[int]:
    """Process ids of the pool's replicas that hold anything of a request."""
    named = {
        labels["replica"]
        for name, labels, value in server.metrics()
        if labels.get("pool") == pool
        and value
        and (
            name in ("splitserve_requests_in_flight", "splitserve_requests_queued")
            or (name == "splitserve_kv_blocks" and labels["state"] not in ("free", "cached"))
        )
    }
    said = set(re.findall(rf"{pool} (\d+): ready after .* replica=(\S+)", server.log()))  # in the console's log, too
    pids = [int(pid) for pid, replica in said if f"{pool}-{replica}" in named]
    assert named, f"no {pool} replica holds anything"
    assert len(pids) == len(named), (named, said)
    return pids
