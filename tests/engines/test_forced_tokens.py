"""What grammars force are drafts: every text is the one without, also where a model cuts the same bytes into other
tokens, or where no mask can be made behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from replicas.grammars import grammar_text
from replicas.grammars.followed_text import FollowedText
from replicas.settings import EngineSettings, SpeculationSettings
from scheduler.admission import AdmissionPolicy
from scheduler.grammar import Grammar
from scheduler.length_estimator import LengthEstimator
from scheduler.sampling_params import SamplingParams
from tests.engines.drafting_system import CountedDrafts, FailingDrafter, OracleDrafter, assert_same, draft_with
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_pools import ManySystem
from tests.engines.local_system import GREEDY, Generated, LocalSystem
from tests.engines.tiny_model import tiny_settings
from tests.engines.tiny_tokenizer import BEGIN_ID, DONE_ID, END_ID

SLOW = pytest.mark.slow
PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(5 + 11 * number)] for number in range(6)]
PERSON = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 5},
        "ageing": {"enum": ["very old", "very young", "verily"]},
        "tags": {"type": "array", "items": {"const": "tagged"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name_of_the_person", "ageing", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar(grammar_text.json_schema(PERSON)),
    Grammar(grammar_text.choice(["the same beginning, and an end", "the same beginning, or another", "nothing"])),
    Grammar(grammar_text.regex("name: [a-c]{1,3}; age: [0-9]{2}; done")),
    # Tokens that are forced by their ids: nothing else can stand for them.
    Grammar(grammar_text.lark(f'start: "<" <[{DONE_ID}]> <[77]> <[78]> <[79]> /[a-f]/ "no more of it, whatever"')),
    Grammar(
        grammar_text.lark(f'start: "[name]" /[a-z]/ "[eman]" <[{DONE_ID}]>'), begins_after=(BEGIN_ID,), repeats=True
    ),
    Grammar(grammar_text.json_schema({"const": {"a key of some length": [1, "two", None]}}), begins_after=(BEGIN_ID,)),
]
WAYS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, num_logprobs=2),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=7, frequency_penalty=0.3, min_tokens=12),
    SamplingParams(temperature=1.3, min_p=0.02, seed=77, repetition_penalty=1.2),
]
OFTEN = ((BEGIN_ID, 9.0),)
# Its object is compiled; behind what it begins with no mask can be made of it.
OPTIONAL = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1100)}}
LIMITED = Grammar(grammar_text.lark(f'start: "an object: " %json {{{str(OPTIONAL)[1:-1]}}}'.replace("'", '"')))


def asked_of(system: LocalSystem) -> list[Generation]:
    """Every grammar in two ways, alone and with two choices, and others without one."""
    asked = []
    for number, grammar in enumerate(GRAMMARS):
        for index in (number, number + 1):
            way = WAYS[index % len(WAYS)]
            way = replace(way, logit_bias=OFTEN) if grammar.begins_after else way
            asked.append(generation(system, index, way, grammar, num_choices=1 + index % 2))
    return asked + [generation(system, index, way, None) for index, way in enumerate(WAYS)]


def generation(
    system: LocalSystem, number: int, way: SamplingParams, grammar: Grammar | None, num_choices: int = 1
) -> Generation:
    prompt = PROMPTS[number % len(PROMPTS)]
    return system.generation(
        prompt, 44, way, num_choices=num_choices, stop_token_ids=frozenset({END_ID}), grammar=grammar
    )


def forcing(pool: str, folder: Path, method: str = "grammar", **changes: Any) -> EngineSettings:
    return tiny_settings(pool, folder, speculative=SpeculationSettings(method), **changes)


@contextmanager
def running(decode: EngineSettings, prefill: EngineSettings | None = None) -> Iterator[LocalSystem]:
    system = LocalSystem(decode, prefill)
    try:
        yield system
        asyncio.run(system.wait_for_baseline())
    finally:
        system.close()


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[Generated]:
    """Of `asked_of`, a token at a time."""
    with running(tiny_settings("decode", tiny_folder, lag=1)) as system:
        return system.run(asked_of(system))


LAYOUTS = [
    pytest.param("colocated lag 0", marks=SLOW),
    "colocated lag 1",
    pytest.param("1p1d lag 0", marks=SLOW),
    pytest.param("1p1d lag 1", marks=SLOW),
    pytest.param("two_lanes lag 0", marks=SLOW),
    "two_lanes lag 1",
]


@pytest.mark.parametrize("method", ["grammar", pytest.param("ngram", marks=SLOW)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_without(
    tiny_folder: Path, tiny_reference: GrammarReference, expected: list[Generated], layout: str, method: str
) -> None:
    changes: dict[str, Any] = {"lag": int(layout[-1]), "max_batch_tokens": 96}
    if "two_lanes" in layout:
        changes["layout"] = "two_lanes"
    prefill = tiny_settings("prefill", tiny_folder) if "1p1d" in layout else None
    with running(forcing("decode", tiny_folder, method, **changes), prefill) as system:
        asked = asked_of(system)
        for num_drafts in (2, 7):
            draft_with(system.decode, num_drafts)
            CountedDrafts.take()
            assert_same(system.run(asked), expected)
            num_drafted, num_held = CountedDrafts.take()
            assert num_held > 50
            assert num_drafted == num_held or method == "ngram", "no mask allows other tokens where some are forced"
        assert system.decode.engine.runner.num_failed_drafters == 0
    one, got = asked[1], expected[1]
    assert got.token_ids[0] == tiny_reference.text(one.spec), "transformers' own"


def test_guesses_that_are_wrong(
    tiny_folder: Path, tiny_reference: GrammarReference, expected: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another cut of the same bytes into tokens is, what no grammar allows, and what the model does not know."""
    forced, cut = FollowedText.forced, tiny_reference.tokenizer

    def in_bytes(text: FollowedText, most: int) -> tuple[int, ...]:
        wrong = tuple(
            id_ for token in forced(text, most) for byte in _bytes_of(cut, token) for id_ in _ids_of(cut, byte)
        )
        return (*wrong, 499, 511, 1 << 20, 7)[:most]

    monkeypatch.setattr(FollowedText, "forced", in_bytes)
    with running(forcing("decode", tiny_folder, lag=1)) as system:
        draft_with(system.decode, 7)
        CountedDrafts.take()
        assert_same(system.run(asked_of(system)), expected)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 40


def _bytes_of(tokenizer: LLTokenizer, token_id: int) -> list[bytes]:
    return [bytes([byte]) for byte in tokenizer.decode_bytes([token_id])]


def _ids_of(tokenizer: LLTokenizer, text: bytes) -> list[int]:
    return list(tokenizer.tokenize_bytes(text))


@pytest.mark.slow
def test_by_measured_times(tiny_folder: Path, expected: list[Generated]) -> None:
    """Whatever is chosen."""
    with running(forcing("decode", tiny_folder, lag=1)) as system:
        asked = asked_of(system)
        for _ in range(2):
            assert_same(system.run(asked), expected)
        drafts = system.decode.engine.scheduler.drafts
        assert drafts is not None
        assert sum(drafts.counts.steps.values()) > 20, "it was asked"


def test_beside_rows_with_drafts_of_others(tiny_folder: Path, expected: list[Generated]) -> None:
    """Masks are counted by the rows that were planned, whoever has how many drafts."""
    with running(forcing("decode", tiny_folder, "ngram", lag=1)) as system:
        asked = asked_of(system)
        asked = [one for pair in zip(asked[:8], asked[-4:] * 2, strict=True) for one in pair]
        right = [one for pair in zip(expected[:8], expected[-4:] * 2, strict=True) for one in pair]
        texts = {
            (tuple(one.spec.prompt_ids), one.spec.sampling.seed, choice): ids
            for one, got in zip(asked, right, strict=True)
            if one.spec.grammar is None
            for choice, ids in got.token_ids.items()
        }
        draft_with(system.decode, 7, OracleDrafter(texts, 0.6))
        CountedDrafts.take()
        assert_same(system.run(asked), right)
        num_drafted, num_held = CountedDrafts.take()
        assert num_drafted > num_held > 50


@pytest.mark.slow
def test_a_drafter_that_fails_takes_nothing_from_grammars(tiny_folder: Path, expected: list[Generated]) -> None:
    with running(forcing("decode", tiny_folder, "ngram", lag=1)) as system:
        asked = asked_of(system)
        draft_with(system.decode, 7, FailingDrafter("draft", 0))
        assert_same(system.run(asked[-4:]), expected[-4:])
        assert system.decode.engine.runner.num_failed_drafters == 1
        CountedDrafts.take()
        assert_same(system.run(asked), expected)
        assert CountedDrafts.take()[1] > 50


@pytest.mark.slow
@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["to host memory", "by replay"])
def test_requests_that_give_way(tiny_folder: Path, expected: list[Generated], host_memory_bytes: int) -> None:
    policy = AdmissionPolicy(quantile=0.05, min_samples=1)
    tight = forcing("decode", tiny_folder, lag=1, kv_capacity_tokens=320, admission=policy)
    tight = replace(tight, model=replace(tight.model, max_model_len=128), host_memory_bytes=host_memory_bytes)
    with running(tight) as system:
        estimator = system.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(5)
        draft_with(system.decode, 4)
        CountedDrafts.take()
        for _ in range(3):  # nothing is drafted while somebody is away: one run may see few
            assert_same(system.run(asked_of(system)), expected)
        assert CountedDrafts.take()[1] > 10
        preemption = system.decode.engine.scheduler.preemption
        assert preemption.num_swapped if host_memory_bytes else preemption.num_evicted


@pytest.mark.slow
def test_an_engine_that_dies(tiny_folder: Path, expected: list[Generated]) -> None:
    """Its texts go on elsewhere within what was forced."""
    system = ManySystem([forcing("decode", tiny_folder, lag=1)] * 2, [tiny_settings("prefill", tiny_folder)])
    try:
        for built in system.decodes.values():
            draft_with(built, 7)
        CountedDrafts.take()
        with running(tiny_settings("decode", tiny_folder)) as local:
            asked = asked_of(local)
        generated = system.run(asked, kill_after=200)
        assert [got.token_ids for got in generated] == [got.token_ids for got in expected]
        assert CountedDrafts.take()[1] > 50
    finally:
        system.close()


@pytest.mark.slow
def test_a_step_that_fails_is_run_in_pieces(
    tiny_folder: Path, expected: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(forcing("decode", tiny_folder, lag=1)) as system:
        draft_with(system.decode, 7)
        runner = system.decode.engine.runner
        forward, choose, calls, failed = runner.forward, runner.choose, iter(range(1, 1 << 30)), []

        def now_and_then(plan: Any) -> None:
            if len(plan.slices) > 1 and next(calls) % 7 == 0:
                failed.append(sum(row.num_tokens > 1 for row in plan.rows))
                raise RuntimeError("an injected fault")

        def failing_forward(plan: Any) -> Any:
            now_and_then(plan)
            return forward(plan)

        def failing_choose(forwarded: Any, masks: Any = None) -> Any:
            now_and_then(forwarded.plan)
            return choose(forwarded, masks)

        monkeypatch.setattr(runner, "forward", failing_forward)
        monkeypatch.setattr(runner, "choose", failing_choose)
        assert_same(system.run(asked_of(system)), expected)
        assert sum(failed) > 5, "rows with guesses among them"


@pytest.mark.parametrize("layout", ["colocated", pytest.param("two_lanes", marks=SLOW)])
def test_a_limit_behind_what_is_forced_is_struck_where_it_was(
    tiny_folder: Path, expected: list[Generated], layout: str
) -> None:
    """Not a token earlier or later, in the same words, and it is nobody else's."""

    async def ended(system: LocalSystem) -> tuple[list[int], Any, list[int]]:
        router = await system.start_router()
        got: list[int] = []
        other = generation(system, 0, WAYS[0], GRAMMARS[0])

        async def limited() -> None:
            async for batch in router.generate(generation(system, 1, WAYS[1], LIMITED)):
                got.extend(token.token_id for token in batch if hasattr(token, "token_id"))

        async def good() -> list[int]:
            return [token.token_id async for batch in router.generate(other) for token in batch]  # type: ignore[union-attr]

        try:
            error, ids = await asyncio.gather(limited(), good(), return_exceptions=True)
        finally:
            await router.stop()
        assert isinstance(ids, list)
        return got, error, ids

    with running(tiny_settings("decode", tiny_folder, lag=1)) as system:
        right = asyncio.run(ended(system))
    assert isinstance(right[1], ApiError)
    assert (right[1].code, right[2]) == ("grammar_limit", expected[0].token_ids[0])
    changes = {"layout": "two_lanes"} if layout == "two_lanes" else {}
    with running(forcing("decode", tiny_folder, lag=1, **changes)) as system:
        draft_with(system.decode, 7)
        CountedDrafts.take()
        got = asyncio.run(ended(system))
        assert CountedDrafts.take()[0] > 5
        assert all(built.engine.is_healthy(60.0) for built in system.engines)
    assert (got[0], got[2]) == (right[0], right[2])
    assert isinstance(got[1], ApiError)
    assert (got[1].code, got[1].message) == (right[1].code, right[1].message)
