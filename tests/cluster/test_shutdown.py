"""The end of `splitserve serve`: signals, and the wait for streams."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.config.root import Config
from cluster.lifecycle.shutdown import StopRequest, StopSignals, num_open_of, wait_for_streams
from cluster.serving import local_ray, serve_command
from cluster.serving.child_processes import descendants
from cluster.terminal.terminal import Terminal
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
    assert signals.requested.wait(60.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_finds_the_wait_wherever_it_is(signals: StopSignals) -> None:
    """Its handler runs in the thread that waits, between any two lines of that."""

    def is_stuck(*_: object) -> None:
        raise AssertionError("the handler waits for the thread that it has interrupted")

    before = sys.gettrace(), signal.signal(signal.SIGALRM, is_stuck)
    try:
        for line in range(1, 200):
            signals = StopSignals()
            signals.install()
            num_lines = _wait_with_a_signal_at(signals, line)
            assert signals.requested.is_set() == (num_lines >= line)
            if num_lines < line:
                return
    finally:
        sys.settrace(before[0])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before[1])


def _wait_with_a_signal_at(signals: StopSignals, line: int) -> int:
    """How many lines there were."""
    num_lines = 0

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == line:
                signal.raise_signal(signal.SIGTERM)
        return trace

    signal.setitimer(signal.ITIMER_REAL, 20.0)
    sys.settrace(trace)
    signals.requested.wait(0.001)
    sys.settrace(None)
    return num_lines


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


def test_once_ray_ends_no_signal_interrupts_it(signals: StopSignals) -> None:
    signals.requested.set()
    signals.ignore()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


# -- ingresses that do not answer ------------------------------------------------------------------


def test_what_nobody_answers_is_not_taken_for_nothing() -> None:
    gone = ActorDiedError()
    for answers, num_open in (
        ([2, 0, 3], 5),
        ([], 0),
        ([2, gone], 2),
        ([gone], 0),
        ([2, TimeoutError()], None),
        ([0, GetTimeoutError("not in time")], None),
        ([ActorUnavailableError("for the moment", None)], None),
    ):
        assert num_open_of(answers) == num_open, answers


class Asked:
    """A handle to the ingresses. answers: what each gives, time after time; an exception of a whole call is raised."""

    def __init__(self, *answers: list[object] | Exception) -> None:
        self.answers, self.methods = list(answers), list[str]()

    def broadcast(self, method: str) -> Asked:
        self.methods.append(method)
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[object]:
        assert return_exceptions
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def drained(monkeypatch: pytest.MonkeyPatch, asked: Asked, timeout_s: float = 60.0) -> list[str]:
    """What is said."""
    said = io.StringIO()
    monkeypatch.setattr(local_ray, "ingresses", lambda: asked)
    serve_command._drain(Terminal(err=said), timeout_s)
    return said.getvalue().replace("splitserve: ", "").splitlines()


@pytest.mark.parametrize("silence", [[TimeoutError()], TimeoutError("broadcast"), RuntimeError("no controller")])
def test_streams_of_an_ingress_that_does_not_answer_are_not_cut(
    monkeypatch: pytest.MonkeyPatch, silence: list[object] | Exception
) -> None:
    """A starved machine: it answers the third time, and its stream ends before the fifth."""
    asked = Asked(silence, silence, [1], [1], [0])
    said = drained(monkeypatch, asked)
    assert asked.methods == ["begin_drain"] * 5, "whoever did not hear it is told again"
    assert [line.partition(";")[0] for line in said] == [
        "an ingress does not answer, so requests may be open",
        "1 request is not over",
    ]


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    said = drained(monkeypatch, Asked([TimeoutError()]), timeout_s=0.3)
    assert said[-1] == "an ingress did not answer until lifecycle.drain_timeout_s was over: requests may be cut"
    assert (
        drained(monkeypatch, Asked([3]), timeout_s=0.3)[-1] == "3 requests are cut: lifecycle.drain_timeout_s is over"
    )


def test_without_any_ingress_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drained(monkeypatch, Asked(DeploymentUnavailableError(DeploymentID("ingress", "splitserve")))) == []
    assert drained(monkeypatch, Asked([])) == []


@pytest.mark.parametrize(("lost", "asked"), [("gcs_server", ["begin_drain"] * 2), ("raylet", [])])
def test_when_ray_itself_has_died_streams_end_if_they_can_and_all_is_ended(
    monkeypatch: pytest.MonkeyPatch, lost: str, asked: list[str]
) -> None:
    said, ingresses, looks, done = io.StringIO(), Asked([1], [0]), iter([None, None, lost]), list[str]()
    monkeypatch.setattr(local_ray, "lost_process", lambda: next(looks))
    monkeypatch.setattr(local_ray, "ingresses", lambda: ingresses)
    monkeypatch.setattr(local_ray, "stop_listening", lambda: done.append("listens no more"))
    monkeypatch.setattr(local_ray, "kill_ray", lambda: done.append("killed"))
    with pytest.raises(UserError, match=f"Ray's {lost} has died"):
        serve_command._wait_for_the_end(Terminal(err=said), StopRequest())
    assert ingresses.methods == asked
    assert done == ["listens no more", "killed"]
    assert f"Ray's {lost} has died" in said.getvalue()


def test_a_signal_ends_it_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "lost_process", lambda: None)
    stop = StopRequest()
    threading.Timer(0.5, stop.set).start()
    serve_command._wait_for_the_end(Terminal(err=io.StringIO()), stop)


def test_who_has_been_started_by_whom() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        grandchild = int(shell.stdout.readline())
        found = descendants(os.getpid())
        assert found.index(shell.pid) < found.index(grandchild)
        assert descendants(grandchild) == []
        os.kill(grandchild, signal.SIGKILL)
    assert not {shell.pid, grandchild} & set(descendants(os.getpid()))
