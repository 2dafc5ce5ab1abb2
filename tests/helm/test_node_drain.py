"""The preStop hook of worker pods."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.lifecycle import node_drain


def _process(proc: Path, pid: str, title: bytes, namespace: str) -> None:
    (proc / pid / "ns").mkdir(parents=True)
    (proc / pid / "cmdline").write_bytes(title)
    (proc / pid / "ns" / "mnt").symlink_to(namespace)


def test_counts_replicas_of_this_container_only(tmp_path: Path) -> None:
    _process(tmp_path, "self", b"python\0-m\0cluster.node_drain", "mnt:[1]")
    _process(tmp_path, "10", b"ray::ServeReplica:splitserve:decode.generate", "mnt:[1]")
    _process(tmp_path, "11", b"ray::ServeReplica:splitserve:decode", "mnt:[2]")
    _process(tmp_path, "12", b"ray::ServeController.listen", "mnt:[1]")
    (tmp_path / "13").mkdir()  # has just ended
    assert node_drain.replica_pids(tmp_path) == [10]


def test_waits_until_the_last_replica_has_ended_or_time_is_up() -> None:
    now_s, left = 0.0, 6

    def sleep(duration_s: float) -> None:
        nonlocal now_s, left
        now_s, left = now_s + duration_s, left - 1

    assert node_drain.wait_until(lambda: left <= 0, 100.0, lambda: now_s, sleep)
    assert now_s == pytest.approx(3.0)
    left = 1_000
    assert not node_drain.wait_until(lambda: left <= 0, 10.0, lambda: now_s, sleep)
    assert 10.0 <= now_s <= 10.5


def test_goes_on_when_ray_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A head that has gone must not keep the pod: the whole release is being uninstalled."""
    monkeypatch.setattr(node_drain, "ask_to_drain", lambda timeout_s, node_id: "the head does not answer")
    monkeypatch.setattr(node_drain, "replica_pids", list)
    assert node_drain.main(["--timeout-s=1"]) == 0
    assert "the head does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(("reason", "waited_s"), [(None, 50.0), ("the head does not answer", 20.0)])
def test_waits_for_replacements_only_if_there_will_be_any(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, waited_s: float
) -> None:
    asked, least, most = [], [], []

    def ask(timeout_s: float, node_id: str | None) -> str | None:
        asked.append(timeout_s)
        return reason

    def wait(is_done: object, deadline_s: float, now: object, sleep: object) -> bool:
        least.append(deadline_s - time.monotonic())
        most.append(deadline_s - begun_s)
        return False

    monkeypatch.setattr(node_drain, "ask_to_drain", ask)
    monkeypatch.setattr(node_drain, "wait_until", wait)
    begun_s = time.monotonic()
    assert node_drain.main(["--timeout-s=20", "--replacement-s=30"]) == 1
    assert asked == [50.0], "Ray's deadline has room for both"
    assert least[0] <= waited_s <= most[0], "whatever time has passed in between"
    assert len(most) == 1
