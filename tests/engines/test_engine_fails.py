"""The loop itself fails: every call is answered, steps in flight are over before their blocks are free, and an engine
that cannot go on says so instead of ending its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from replicas.engine.engine import Engine
from replicas.messages import CallStatus, ChannelAddress, GenerateCall, GenerateReply, GenerationSpec
from replicas.serving import engine_builder
from replicas.serving.engine_builder import BuiltEngine, UnhealthyEngine, build_engine
from tests.engines.local_system import GREEDY
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

PATIENCE_S = 120.0


class CountedRunner:
    """A device as it were: what is launched runs on until its result is read, or until somebody waits for all of it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_running = 0
        self.num_finishes = 0
        self.fails_to_finish = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: Any) -> Any:
        self.num_running += 1
        return self._runner.launch(plan)

    def finish(self) -> None:
        self.num_finishes += 1
        if self.fails_to_finish:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.num_running = 0


@pytest.fixture(name="built")
def built_engine(tiny_goldens: TinyGoldens) -> Iterator[BuiltEngine]:
    built = build_engine(tiny_settings("decode", tiny_goldens.folder, lag=1), "decode-0")
    built.engine.runner = CountedRunner(built.engine.runner)  # type: ignore[assignment]
    built.start()
    yield built
    built.stop()


@pytest.fixture
def channel() -> ChannelAddress:
    return ChannelAddress("router", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode())


def reply_of(built: BuiltEngine, channel: ChannelAddress, request_id: str) -> GenerateReply:
    spec = GenerationSpec(tuple(range(1, 20)), (0,), 400, frozenset(), GREEDY)
    return built.engine.generate(GenerateCall(request_id, spec, PATIENCE_S, channel, None)).result(PATIENCE_S)


def fail_once_running(engine: Engine, monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """The next plan with a step in flight raises; seen: what ran on the device when blocks were released after it."""
    plan, release, has_failed = engine.scheduler.plan, engine.scheduler._release, False

    def failing(now_s: float) -> Any:
        nonlocal has_failed
        if engine.core.in_flight and not has_failed:
            has_failed = True
            raise LookupError("a bug of ours")
        return plan(now_s)

    def releasing(request: Any) -> None:
        if has_failed:
            seen.append(engine.runner.num_running)  # type: ignore[attr-defined]
        release(request)

    monkeypatch.setattr(engine.scheduler, "plan", failing)
    monkeypatch.setattr(engine.scheduler, "_release", releasing)


def test_steps_in_flight_are_over_before_their_blocks_are_free(
    built: BuiltEngine, channel: ChannelAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_at_release: list[int] = []
    fail_once_running(built.engine, monkeypatch, running_at_release)
    reply = reply_of(built, channel, "a")
    assert (reply.status, reply.detail) == (CallStatus.ENGINE_FAILED, "the engine failed; see its log")
    assert running_at_release == [0], "its blocks came free while a step still wrote to them"
    assert built.engine.runner.num_finishes == 1  # type: ignore[attr-defined]
    built.check_health()  # once is no pattern
    assert built.engine.scheduler.ledger().blocks.request == 0


@pytest.mark.parametrize("what", ["finish", "abandon", "end", "flush"])
def test_an_engine_that_cannot_clean_up_answers_and_tells(
    built: BuiltEngine, channel: ChannelAddress, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built.engine
    fail_once_running(engine, monkeypatch, [])
    if what == "finish":
        engine.runner.fails_to_finish = True  # type: ignore[attr-defined]
    owner, name = {
        "finish": (engine, "_idle_s"),  # nothing
        "abandon": (engine.scheduler, "steps_abandoned"),
        "end": (engine.scheduler, "end"),
        "flush": (engine, "_flush"),
    }[what]
    if what != "finish":
        method: Callable[..., Any] = getattr(owner, name)

        def raise_once_failing(*arguments: Any) -> Any:
            if engine._num_loop_failures:
                raise LookupError("its books are wrong")
            return method(*arguments)

        monkeypatch.setattr(owner, name, raise_once_failing)
    assert reply_of(built, channel, "a").status is CallStatus.ENGINE_FAILED
    deadline_s = time.monotonic() + PATIENCE_S
    while not engine._is_broken:
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.01)
    with pytest.raises(UnhealthyEngine):
        built.check_health()
    num_steps = engine.steps.num_steps
    later = reply_of(built, channel, "b")
    assert (later.status, later.detail) == (CallStatus.ENGINE_FAILED, "the engine has failed and waits to be replaced")
    assert engine.thread.is_alive()
    assert engine.steps.num_steps == num_steps, "nothing is computed on blocks that cannot be trusted"


def test_one_that_fails_each_request_is_not_healthy_though_it_idles_in_between(
    built: BuiltEngine, channel: ChannelAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(output: Any, now_s: float) -> Any:
        raise LookupError("a bug of ours")

    monkeypatch.setattr(built.engine.scheduler, "commit", failing)
    for number in range(3):
        built.check_health()
        assert reply_of(built, channel, f"{number}").status is CallStatus.ENGINE_FAILED
        time.sleep(0.1)  # it comes round with nothing to do
    with pytest.raises(UnhealthyEngine):
        built.check_health()
    monkeypatch.undo()


def test_one_that_fails_with_nothing_to_do_neither_spins_nor_floods_the_log(
    built: BuiltEngine,
    channel: ChannelAddress,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing() -> Any:
        raise AssertionError("blocks that nobody holds")

    monkeypatch.setattr(built.engine.scheduler, "ledger", failing)
    began_s, num_failures, took_s = time.monotonic(), 0, 0.0
    while num_failures < 3 or took_s < 1.5:
        assert took_s < PATIENCE_S, "it has stopped trying"
        time.sleep(0.1)
        num_failures = len([record for record in caplog.records if vars(record).get("event") == "loop_failed"])
        took_s = time.monotonic() - began_s
    assert num_failures <= 8 * took_s
    assert not built.engine.is_healthy(PATIENCE_S)
    assert reply_of(built, channel, "a").status in (CallStatus.ENGINE_FAILED, CallStatus.OK), "it still answers"
    monkeypatch.undo()


def test_a_transfer_thread_that_computes_for_ever_is_not_healthy(
    built: BuiltEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch takes it for a long turn."""
    built.check_health()
    turn, is_stuck, goes_on = built.transfers._turn, threading.Event(), threading.Event()

    def stuck(*arguments: Any) -> None:
        is_stuck.set()
        goes_on.wait(PATIENCE_S)
        turn(*arguments)

    monkeypatch.setattr(built.transfers, "_turn", stuck)
    assert is_stuck.wait(PATIENCE_S)
    monkeypatch.setattr(engine_builder, "_MAX_SILENCE_S", 0.5)
    monkeypatch.setattr(built.engine, "is_healthy", lambda max_silence_s: True)
    time.sleep(0.6)
    try:
        with pytest.raises(UnhealthyEngine, match="transfer thread is stuck"):
            built.check_health()
    finally:
        goes_on.set()
