"""Engines that draft: every text is the one without, whatever drafts, and wherever it is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.routing.generation import Generation
from replicas.engine.engine_watch import EngineWatch
from replicas.grammars import grammar_text
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams
from scheduler.grammar import Grammar
from scheduler.length_estimator import LengthEstimator
from scheduler.sampling_params import SamplingParams
from tests.engines.drafting_system import (
    CountedDrafts,
    FailingDrafter,
    HangingDrafter,
    OracleDrafter,
    SameDrafter,
    Texts,
    assert_same,
    draft_with,
    drafting,
)
from tests.engines.local_pools import ManySystem
from tests.engines.local_system import Generated, LocalSystem
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import save_tiny_model, tiny_settings

SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param("colocated lag 0", marks=SLOW),
    "colocated lag 1",
    "1p1d lag 1",
    pytest.param("two_lanes lag 0", marks=SLOW),
    "two_lanes lag 1",
]
LENGTHS = (1, 2, 15, 16, 17, 40, 100, 190)
# Of six tokens each text is full of what was there before: n-grams find something, and are wrong often enough.
PROMPTS = [[(7 * number + 13 * index) % 40 for index in range(5 + 23 * number)] for number in range(6)]
FEW = tuple(range(20, 26))
WAYS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.1, seed=9),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(temperature=0.3, seed=2, allowed_token_ids=FEW),
    SamplingParams(temperature=0.0, allowed_token_ids=FEW, num_logprobs=3, seed=3),
    SamplingParams(temperature=0.7, seed=4, frequency_penalty=0.4, presence_penalty=0.2, allowed_token_ids=FEW),
    SamplingParams(temperature=0.4, seed=5, allowed_token_ids=FEW, bad_words=((20, 21), (22, 20, 23)), num_logprobs=0),
    SamplingParams(temperature=0.9, top_k=40, min_p=0.02, seed=6, logit_bias=((16, 4.0), (24, 4.0)), min_tokens=20),
    SamplingParams(temperature=0.2, seed=7, allowed_token_ids=FEW, num_prompt_logprobs=2),
]
STOPS = frozenset(range(0, 512, 8))
OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)
RIGHT = (0.0, 0.5, 0.9, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@contextmanager
def running(decode: EngineSettings, prefill: EngineSettings | None = None) -> Iterator[LocalSystem]:
    system = LocalSystem(decode, prefill)
    try:
        yield system
    finally:
        system.close()


def in_layout(name: str, folder: Path, **changes: Any) -> tuple[EngineSettings, EngineSettings | None]:
    layout, _, lag = name.split()
    decode = drafting(tiny_settings("decode", folder, lag=int(lag), max_batch_tokens=96, **changes))
    if layout == "two_lanes":
        decode = replace(decode, layout=layout)
    return decode, tiny_settings("prefill", folder) if layout == "1p1d" else None


@pytest.fixture(scope="module", params=LAYOUTS)
def system(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalSystem]:
    with running(*in_layout(request.param, folder)) as running_system:
        yield running_system


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LocalSystem]:
    """Without drafts, one token at a time, as ever."""
    with running(tiny_settings("decode", folder, kv_capacity_tokens=16384)) as running_system:
        assert running_system.decode.engine.scheduler.drafts is None
        yield running_system


def asked_of(system: LocalSystem) -> list[Generation]:
    """Every way, long and short; stops; several choices."""
    asked = [system.generation(PROMPTS[n % 6], 60, way) for n, way in enumerate(WAYS)]
    asked += [system.generation(PROMPTS[(n + 1) % 6], 40, way, stop_token_ids=STOPS) for n, way in enumerate(WAYS)]
    asked += [system.generation(PROMPTS[(n + 2) % 6], 30, way, num_choices=3) for n, way in enumerate(WAYS[:6])]
    asked += [system.generation(PROMPTS[n % 6], n, WAYS[n % 5]) for n in range(1, 8)]
    return asked


@pytest.fixture(scope="module")
def expected(plain: LocalSystem) -> list[Generated]:
    """Of `asked_of`."""
    return plain.run(asked_of(plain))


def texts_of(asked: list[Generation], generated: list[Generated]) -> Texts:
    return {
        (tuple(one.spec.prompt_ids), one.spec.sampling.seed, choice): ids
        for one, got in zip(asked, generated, strict=True)
        for choice, ids in got.token_ids.items()
    }


def at_rest(system: LocalSystem) -> None:
    asyncio.run(system.wait_for_baseline())


@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=SLOW), 2, pytest.param(4, marks=SLOW), 7])
def test_goldens(system: LocalSystem, tiny_goldens: TinyGoldens, num_drafts: int) -> None:
    """Greedy texts are transformers' own; by n-grams, and by somebody who knows them."""
    goldens = [tiny_goldens.of(length) for length in LENGTHS]
    asked = [system.generation(golden.prompt_ids, len(golden.output_ids)) for golden in goldens]
    texts: Texts = {(tuple(golden.prompt_ids), 0, 0): golden.output_ids for golden in goldens}
    for drafter in (None, *[OracleDrafter(texts, right) for right in (0.6, 1.0)]):
        CountedDrafts.take()
        draft_with(system.decode, num_drafts, drafter)
        generated = system.run(asked)
        assert [got.token_ids[0] for got in generated] == [golden.output_ids for golden in goldens]
        num_drafted, num_held = CountedDrafts.take()
        if drafter is not None and num_drafts:
            assert num_drafted > num_held / 2 > 50
    at_rest(system)


@pytest.mark.parametrize("num_drafts", [pytest.param(2, marks=SLOW), 7])
def test_every_way_of_choosing(system: LocalSystem, expected: list[Generated], num_drafts: int) -> None:
    asked = asked_of(system)
    texts = texts_of(asked, expected)
    for drafter in (None, OracleDrafter(texts, 0.5), OracleDrafter(texts, 0.9)):
        CountedDrafts.take()
        draft_with(system.decode, num_drafts, drafter)
        assert_same(system.run(asked), expected)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 50, "drafts of both kinds"
    at_rest(system)


def test_a_second_turn_finds_what_was_drafted_in_the_first(folder: Path, plain: LocalSystem) -> None:
    """Blocks that drafts have filled hold what counts: a prompt that goes on from an answer is computed from them."""
    first = [plain.generation(prompt, 60, WAYS[2]) for prompt in PROMPTS[:4]]
    answers = plain.run(first)
    follow = [[*p, *got.token_ids[0], 7, 8, 9] for p, got in zip(PROMPTS, answers, strict=False)]
    second = [plain.generation(prompt, 40, WAYS[4]) for prompt in follow]
    expected = plain.run(second)
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        draft_with(system.decode, 4, OracleDrafter(texts_of(first, answers), 0.7))
        assert_same(system.run(first), answers)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 20
        prefixes = system.decode.engine.scheduler.prefixes
        assert prefixes is not None
        before = prefixes.num_found_tokens
        assert_same(system.run(second), expected)
        num_whole = sum((len(p) + 60 - 1) // 16 * 16 for p in PROMPTS[:4])
        assert prefixes.num_found_tokens - before == num_whole, "all that is committed, and nothing else"
        at_rest(system)


def forgetful(system: LocalSystem) -> LocalSystem:
    """Outputs were very short so far."""
    estimator = system.decode.engine.scheduler.budget.estimator
    assert isinstance(estimator, LengthEstimator)
    for _ in range(100):
        estimator.observe(20)
    return system


@pytest.mark.parametrize("lag", [pytest.param(0, marks=SLOW), 1])
@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["to host memory", "by replay"])
def test_requests_that_give_way(folder: Path, plain: LocalSystem, host_memory_bytes: int, lag: int) -> None:
    asked = [plain.generation(prompt, 130, way) for prompt in PROMPTS for way in (WAYS[1], WAYS[2])]
    expected = plain.run(asked)
    tight = tiny_settings("decode", folder, lag=lag, kv_capacity_tokens=960, admission=OPTIMISTIC)
    with running(drafting(replace(tight, host_memory_bytes=host_memory_bytes))) as system:
        draft_with(system.decode, 4, OracleDrafter(texts_of(asked, expected), 0.7))
        CountedDrafts.take()
        assert_same(forgetful(system).run(asked), expected)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 50
        preemption = system.decode.engine.scheduler.preemption
        assert preemption.num_swapped if host_memory_bytes else preemption.num_evicted
        at_rest(system)


def test_an_engine_that_dies(folder: Path, plain: LocalSystem) -> None:
    """What it had said is the prompt's end elsewhere, and a part of what drafts are looked for in."""
    asked = [plain.generation(prompt, 100, way) for prompt in PROMPTS for way in (WAYS[0], WAYS[2], WAYS[3])]
    expected = plain.run(asked)
    decode = drafting(tiny_settings("decode", folder, lag=1))
    system = ManySystem([decode] * 2, [tiny_settings("prefill", folder)])
    try:
        for built in system.decodes.values():
            draft_with(built, 4, OracleDrafter(texts_of(asked, expected), 0.7))
        CountedDrafts.take()
        generated = system.run(asked, kill_after=300)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 50
        assert [got.token_ids for got in generated] == [got.token_ids for got in expected]
    finally:
        system.close()


def test_beams_beside_rows_with_drafts(folder: Path, plain: LocalSystem) -> None:
    asked = [plain.generation(p, 40, beam=BeamParams(3, 1.0, False), num_choices=2) for p in PROMPTS[:3]]
    asked += [plain.generation(prompt, 60, way) for prompt, way in zip(PROMPTS, WAYS, strict=False)]
    expected = plain.run(asked)
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        draft_with(system.decode, 7, OracleDrafter(texts_of(asked[3:], expected[3:]), 0.7))
        CountedDrafts.take()
        assert_same(system.run(asked), expected)
        assert CountedDrafts.take()[1] > 50
        at_rest(system)


def test_clients_that_leave(folder: Path, plain: LocalSystem) -> None:
    """Rows with drafts in flight, of requests that are over."""

    async def leave_early(system: LocalSystem) -> None:
        router = await system.start_router()
        try:
            for number in range(12):
                stream = router.generate(system.generation(PROMPTS[number % 6], 120, WAYS[2], num_choices=2))
                num_tokens = 0
                async for batch in stream:
                    num_tokens += len(batch)
                    if num_tokens > 5 * number:
                        break
                await stream.aclose()
            await system.wait_for_baseline()
        finally:
            await router.stop()

    asked = [plain.generation(PROMPTS[0], 60, WAYS[2])]
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        draft_with(system.decode, 7)
        asyncio.run(leave_early(system))
        assert_same(system.run(asked), plain.run(asked))


@pytest.mark.parametrize("method", [pytest.param("start", marks=SLOW), "draft", pytest.param("accepted", marks=SLOW)])
def test_a_drafter_that_fails_costs_drafts_only(
    folder: Path, expected: list[Generated], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        draft_with(system.decode, 4, FailingDrafter(method, num_before=5))
        assert_same(system.run(asked_of(system)), expected)
        at_rest(system)
        built = system.decode
        assert not built.engine.runner.can_draft(SamplingParams())
        (failed,) = [f for f in built.metrics_snapshot() if f["name"] == "splitserve_speculative_failed_drafters"]
        assert [value for suffix, _, value in failed["samples"] if suffix == "_total"] == [1]
    assert [r.exc_info[1].args for r in caplog.records if getattr(r, "event", "") == "drafter_failed"] == [
        ("a drafter's own bug",)
    ]


@pytest.mark.parametrize("name", ["colocated lag 1", pytest.param("two_lanes lag 1", marks=SLOW)])
def test_a_drafter_that_hangs_is_a_thread_that_stands_still(
    folder: Path, expected: list[Generated], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch ends such a process, and says where it stood; its streams go on elsewhere. (Here it wakes up.)

    A thread that a disk keeps waiting stands still elsewhere: then again.
    """
    stood = list[str]()
    while not stood or ("self.wakes.wait()" not in stood[-1] and len(stood) < 3):
        caplog.clear()
        stood.append(where_it_stood(folder, expected, name, caplog))
    assert "self.wakes.wait()" in stood[-1]


def where_it_stood(folder: Path, expected: list[Generated], name: str, caplog: pytest.LogCaptureFixture) -> str:
    """What the watch says of an engine whose drafter hangs, once."""
    drafter, codes = HangingDrafter([20], num_before=7), []

    def end_process(code: int) -> None:
        codes.append(code)
        drafter.wakes.set()

    with running(*in_layout(name, folder)) as system:
        draft_with(system.decode, 4, drafter)
        watch = EngineWatch(system.decode.watched(), restart_after_s=1.0, end_process=end_process, interval_s=0.1)
        watch.start()
        try:
            assert_same(system.run(asked_of(system)), expected)
        finally:
            watch.stop()
        at_rest(system)
    assert len(codes) == 1
    (said,) = [record for record in caplog.records if getattr(record, "event", "") == "engine_frozen"]
    return said.getMessage()


def test_drafts_that_are_no_tokens_are_none(folder: Path, expected: list[Generated]) -> None:
    drafter = SameDrafter([20, 1 << 40, 20])
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        draft_with(system.decode, 4, drafter)
        assert_same(system.run(asked_of(system)), expected)
        at_rest(system)
        assert system.decode.engine.runner.num_failed_drafters == 0
    assert drafter.num_asked > 50


def test_a_drafter_that_answers_for_other_rows_has_failed(folder: Path, expected: list[Generated]) -> None:
    drafter = SameDrafter([20], num_rows=999)
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        draft_with(system.decode, 4, drafter)
        assert_same(system.run(asked_of(system)), expected)
        at_rest(system)
        assert system.decode.engine.runner.num_failed_drafters == 1
    assert drafter.num_asked == 1


def test_a_step_that_fails_is_run_in_pieces_with_its_drafts(
    folder: Path, expected: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(drafting(tiny_settings("decode", folder, lag=1))) as system:
        asked = asked_of(system)
        draft_with(system.decode, 4, OracleDrafter(texts_of(asked, expected), 0.7))
        runner = system.decode.engine.runner
        choose, calls, failed = runner.choose, iter(range(1, 1 << 30)), []

        def fails_now_and_then(forwarded: Any, masks: Any = None) -> Any:
            if next(calls) % 7 == 0 and len(forwarded.plan.slices) > 1:
                failed.append(sum(row.num_tokens > 1 for row in forwarded.plan.rows))
                raise RuntimeError("an injected fault")
            return choose(forwarded, masks)

        monkeypatch.setattr(runner, "choose", fails_now_and_then)
        assert_same(system.run(asked), expected)
        assert sum(failed) > 5, "rows with drafts among them"
        at_rest(system)


@pytest.mark.parametrize("name", ["colocated lag 1", "two_lanes lag 1"])
def test_rows_with_grammars_beside_rows_with_drafts(tiny_folder: Path, name: str) -> None:
    """Masks are made by the plan, in which every row has all the drafts that it may have."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 9}
    grammar = Grammar(grammar_text.json_schema(schema))

    def asked_of_both(system: LocalSystem) -> list[Generation]:
        rows = [system.generation(prompt, 60, way) for prompt, way in zip(PROMPTS, WAYS, strict=False)]
        held = [
            system.generation(
                prompt, 40, SamplingParams(temperature=0.0, seed=90 + n), num_choices=1 + n % 2, grammar=grammar
            )
            for n, prompt in enumerate(PROMPTS)
        ]
        return [one for pair in zip(rows, held, strict=True) for one in pair]

    with running(tiny_settings("decode", tiny_folder, lag=1)) as system:
        expected = system.run(asked_of_both(system))
    with running(*in_layout(name, tiny_folder)) as system:
        asked = asked_of_both(system)
        draft_with(system.decode, 7, OracleDrafter(texts_of(asked, expected), 0.6))
        CountedDrafts.take()
        assert_same(system.run(asked), expected)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 50
        at_rest(system)
