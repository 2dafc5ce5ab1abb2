"""The end of `splitserve serve`: signals, and the wait for streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.config.root import Config
from cluster.lifecycle.shutdown import StopSignals, wait_for_streams
from cluster.serving import local_ray
from cluster.user_error import UserError


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopSignals()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_insists(signals: StopSignals, number: int) -> None:
    assert not signals.requested.is_set()
    os.kill(os.getpid(), number)
    assert signals.requested.wait(1.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_streams_are_waited_for_and_told_of_as_they_end() -> None:
    time, said = Time(), list[str]()
    counts = iter([3, 3, 2, 0])
    assert wait_for_streams(lambda: next(counts), 60.0, said.append, lambda: time.now_s, time.sleep) == 0
    assert [line.split()[0] for line in said] == ["3", "2"]


def test_but_no_longer_than_the_drain() -> None:
    time = Time()
    assert wait_for_streams(lambda: 2, 5.0, lambda _: None, lambda: time.now_s, time.sleep) == 2
    assert 5.0 <= time.now_s < 5.2


def start_ray_with(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> list[str]:
    left, said = list(errors), list[str]()

    def start(_: Any) -> None:
        if left:
            raise left.pop(0)

    monkeypatch.setattr(local_ray, "start_ray", start)
    monkeypatch.setattr(local_ray, "stop_ray", lambda: said.append("stopped"))
    return said


CONFIG = Config.model_validate(
    {"pools": {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}}
)


def test_ray_is_started_a_second_time_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said = start_ray_with(monkeypatch, TimeoutError("the node timed out during startup\nmore"))
    local_ray.start_ray_patiently(CONFIG, said.append)
    assert said == ["stopped", "Ray did not start (the node timed out during startup); trying once more"]


def test_then_the_user_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    said = start_ray_with(monkeypatch, TimeoutError("slow"), RuntimeError(""))
    with pytest.raises(UserError, match=r"Ray did not start: RuntimeError\n.*busy"):
        local_ray.start_ray_patiently(CONFIG, said.append)
