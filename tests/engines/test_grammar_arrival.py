"""A call waits for its grammar: cancelled, late, refused, overtaken; a step that fails under masks costs its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from replicas.grammars import grammar_cache, grammar_text
from replicas.grammars.compiled_grammar import CompiledGrammar, GrammarRefused
from replicas.messages import CallStatus, ChannelAddress, GenerateCall, GenerateReply
from replicas.model.model_runner import ModelRunner
from scheduler.grammar import Grammar
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import GREEDY, Generated, LocalSystem, collect
from tests.engines.tiny_model import save_tiny_model, tiny_settings
from tests.engines.tiny_tokenizer import END_ID

PATIENCE_S = 120.0
PROMPT = [3, 99, 5, 7, 200, 11]
ENDS = frozenset({END_ID})
ABSENT = ChannelAddress("nobody", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode())
SLOW = Grammar(grammar_text.json_schema({"enum": ["slow", "slower"]}))
FAST = Grammar(grammar_text.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}))


@pytest.fixture
def colocated(tiny_folder: Path) -> Iterator[LocalSystem]:
    system = LocalSystem(tiny_settings("decode", tiny_folder, lag=1), None)
    yield system
    system.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, SLOW is being compiled."""
    may_go_on = threading.Event()
    compile_now = grammar_cache.compile_grammar

    def compile_late(tokenizer: Any, text: str, fuel: Any) -> CompiledGrammar:
        if text == SLOW.text:
            assert may_go_on.wait(PATIENCE_S)
        return compile_now(tokenizer, text, fuel)

    monkeypatch.setattr(grammar_cache, "compile_grammar", compile_late)
    yield may_go_on
    may_go_on.set()


def call(system: LocalSystem, grammar: Grammar, timeout_s: float = PATIENCE_S) -> tuple[str, Future[GenerateReply]]:
    """To the engine itself, of a router that takes no tokens."""
    generation = system.generation(PROMPT, 20, stop_token_ids=ENDS, grammar=grammar)
    asked = GenerateCall(generation.generation_id, generation.spec, timeout_s, ABSENT, None)
    return asked.request_id, system.decode.engine.generate(asked)


def test_who_waits_for_a_grammar_holds_up_nobody(
    colocated: LocalSystem, tiny_reference: GrammarReference, held: threading.Event
) -> None:
    slow, fast, free = (
        colocated.generation(PROMPT, 20, stop_token_ids=ENDS, grammar=grammar) for grammar in (SLOW, FAST, None)
    )

    async def run() -> list[Generated]:
        router = await colocated.start_router()
        try:
            waiting = asyncio.create_task(collect(router, slow))
            others = await asyncio.gather(collect(router, fast), collect(router, free))
            assert not waiting.done()
            assert colocated.decode.engine.calls.is_compiling
            assert not colocated.decode.engine.is_idle, "a replica does not leave from under it"
            held.set()
            return [await waiting, *others]
        finally:
            await router.stop()

    got = asyncio.run(run())
    assert got[0].token_ids[0] == tiny_reference.text(slow.spec)
    assert got[1].token_ids[0] == tiny_reference.text(fast.spec)
    assert got[2].token_ids[0] == colocated.run([free])[0].token_ids[0]


def test_a_call_that_waits_for_its_grammar_can_be_cancelled_and_be_late(
    colocated: LocalSystem, held: threading.Event
) -> None:
    engine = colocated.decode.engine
    name, cancelled = call(colocated, SLOW)
    _, late = call(colocated, SLOW, timeout_s=0.2)
    assert late.result(PATIENCE_S).status is CallStatus.TIMEOUT
    assert not cancelled.done()
    engine.cancel(name)
    assert cancelled.result(PATIENCE_S).status is CallStatus.CANCELLED
    assert not engine.calls.is_compiling
    held.set()
    asyncio.run(colocated.wait_for_baseline(PATIENCE_S))
    assert engine.is_healthy(PATIENCE_S)


def test_the_end_of_an_engine_answers_who_waits_for_a_grammar(tiny_folder: Path, held: threading.Event) -> None:
    system = LocalSystem(tiny_settings("decode", tiny_folder), None)
    _, waiting = call(system, SLOW)
    system.close()
    assert waiting.result(PATIENCE_S).status is CallStatus.REJECTED


def test_a_refused_grammar_is_the_requests_own_fault(colocated: LocalSystem) -> None:
    for _ in range(2):
        _, reply = call(colocated, Grammar("start: foo"))
        assert reply.result(PATIENCE_S).status is CallStatus.GRAMMAR_LIMIT
        assert 'unknown name: "foo"' in reply.result().detail
    assert not CallStatus.GRAMMAR_LIMIT.may_retry


def test_a_model_without_a_tokenizer_serves_all_but_grammars(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    system = LocalSystem(tiny_settings("decode", tmp_path), None)
    _, reply = call(system, FAST)
    assert reply.result(PATIENCE_S).status is CallStatus.ERROR
    assert "no grammars" in reply.result().detail
    assert len(system.run([system.generation(PROMPT, 5)])[0].token_ids[0]) == 5
    system.close()


@pytest.mark.parametrize("is_refused", [False, True])
def test_kv_that_was_read_waits_for_the_grammar(
    tiny_folder: Path, tiny_reference: GrammarReference, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Prefill knows it already, decode does not: the KV is there first, and is let go whatever comes."""
    system = LocalSystem(*(tiny_settings(pool, tiny_folder, lag=1) for pool in ("decode", "prefill")))
    generation = system.generation(PROMPT, 20, stop_token_ids=ENDS, grammar=FAST)
    decode = system.decode
    assert decode.grammars is not None
    coming: Future[CompiledGrammar] = Future()
    compiled = decode.grammars.cache.get(FAST.text).result(PATIENCE_S)
    monkeypatch.setattr(decode.grammars.cache, "get", lambda text: coming)

    def has_read() -> bool:
        return any(opened.is_kv_read for opened in list(decode.engine.calls.by_id.values()))

    async def run() -> Any:
        router = await system.start_router(max_retries=0)
        try:
            waiting = asyncio.create_task(collect(router, generation))
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            while not has_read():
                assert asyncio.get_running_loop().time() < deadline_s
                await asyncio.sleep(0.01)
            if is_refused:
                coming.set_exception(GrammarRefused("not this one"))
            else:
                coming.set_result(compiled)
            got = (await asyncio.gather(waiting, return_exceptions=True))[0]
            await system.wait_for_baseline(PATIENCE_S)
            return got
        finally:
            await router.stop()

    got = asyncio.run(run())
    if is_refused:
        assert (got.status, got.code) == (400, "grammar_limit")
    else:
        assert got.token_ids[0] == tiny_reference.text(generation.spec)
    system.close()


@pytest.mark.parametrize("phase", ["forward", "choose"])
@pytest.mark.parametrize("layout", ["colocated", "two_lanes"])
def test_a_step_that_fails_under_masks_is_run_in_pieces(
    tiny_folder: Path, tiny_reference: GrammarReference, monkeypatch: pytest.MonkeyPatch, phase: str, layout: str
) -> None:
    """The texts of all but the one that makes it fail are as ever, and so is what their grammars allow."""
    system = LocalSystem(tiny_settings("decode", tiny_folder, lag=1, layout=layout.replace("colocated", "split")), None)
    generations = [
        system.generation(PROMPT[number:], 20, replace(GREEDY, temperature=0.9, seed=number), stop_token_ids=ENDS,
                          grammar=FAST if number % 2 else None)
        for number in range(4)
    ]  # fmt: skip
    honest = getattr(ModelRunner, phase)
    hits: list[int] = []

    def failing(runner: ModelRunner, subject: Any, *more: Any) -> Any:
        plan = subject if phase == "forward" else subject.plan
        if plan.num_rows > 2 and len(hits) < 5:
            hits.append(plan.step_id)
            raise RuntimeError("a step fails as a whole")
        return honest(runner, subject, *more)

    alone = [system.run([generation])[0].token_ids for generation in generations]
    monkeypatch.setattr(ModelRunner, phase, failing)
    together = system.run(generations)
    assert hits
    assert [got.token_ids for got in together] == alone
    for generation in generations[1::2]:
        assert together[generations.index(generation)].token_ids[0] == tiny_reference.text(generation.spec)
    asyncio.run(system.wait_for_baseline(PATIENCE_S))
    system.close()
