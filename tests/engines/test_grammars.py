"""Constrained texts are those of transformers' generate, wherever they are computed and whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from replicas.grammars import grammar_text
from replicas.messages import CallStatus
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.grammar import Grammar
from scheduler.length_estimator import LengthEstimator
from scheduler.request import RequestState
from scheduler.sampling_params import SamplingParams
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import GREEDY, Generated, LocalSystem
from tests.engines.tiny_model import tiny_settings
from tests.engines.tiny_tokenizer import BEGIN_ID, DONE_ID, END_ID

LAYOUTS = ["1p1d lag 0", "1p1d lag 1", "colocated lag 0", "colocated lag 1", "two_lanes lag 0", "two_lanes lag 1"]
PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(5 + 11 * number)] for number in range(6)]
ENDS = frozenset({END_ID})
WORD = {"type": "string", "maxLength": 6}
SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"enum": ["red", "green", "blue", 7, None]},
    {"const": {"a": [1, "two", None]}},
    WORD,
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}], "items": False, "minItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": WORD, "b": {"enum": [1, 2]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            }
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 2}]},
    {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 10, "maximum": 12}]},
    {
        "$defs": {"leaf": {"enum": ["l"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "minItems": 1,
        "maxItems": 3,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
        "propertyNames": {"maxLength": 3},
    },
]
GRAMMARS = [Grammar(grammar_text.json_schema(schema, strict=False)) for schema in SCHEMAS]
OTHERS = [
    Grammar(grammar_text.choice(["yes", "no", "perhaps not"])),
    Grammar(grammar_text.regex("[a-f]{3}-[0-9]{2,4}")),
    Grammar(grammar_text.lark('start: pair+\npair: /[a-z]/ "=" /[0-9]/ ";"')),
]
SAMPLED = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=2**63 + 9),
    SamplingParams(temperature=1.3, min_p=0.02, seed=77, presence_penalty=0.5, frequency_penalty=0.3),
]
MAX_TOKENS = 40
OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)


@contextmanager
def running(decode: EngineSettings, prefill: EngineSettings | None) -> Iterator[LocalSystem]:
    system = LocalSystem(decode, prefill)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def system(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[LocalSystem]:
    changes: dict[str, Any] = {"lag": int(request.param[-1]), "max_batch_tokens": 48}
    if "two_lanes" in request.param:
        changes["layout"] = "two_lanes"
    prefill = tiny_settings("prefill", tiny_folder, **changes) if "1p1d" in request.param else None
    with running(tiny_settings("decode", tiny_folder, **changes), prefill) as system:
        yield system


def asked(system: LocalSystem, number: int, grammar: Grammar | None, params: SamplingParams, **more: Any) -> Generation:
    prompt = PROMPTS[number % len(PROMPTS)]
    return system.generation(prompt, MAX_TOKENS, params, stop_token_ids=ENDS, grammar=grammar, **more)


def check(tiny_reference: GrammarReference, generation: Generation, got: Generated) -> None:
    for choice in generation.spec.choices:
        assert got.token_ids[choice] == tiny_reference.text(generation.spec, choice), (generation.spec, choice)


def test_texts_are_those_of_transformers(system: LocalSystem, tiny_reference: GrammarReference) -> None:
    """Beside others without a grammar, whose texts stay what they are."""
    grammars = [*GRAMMARS, *OTHERS]
    ways = [GREEDY, *SAMPLED]
    generations = [asked(system, n, grammar, ways[n % len(ways)]) for n, grammar in enumerate(grammars)]
    free = [asked(system, n, None, ways[n % len(ways)]) for n in range(4)]
    (*alone,) = system.run(free)
    generated = system.run([*generations, *free])
    num_stopped = 0
    for generation, got in zip(generations, generated, strict=False):
        check(tiny_reference, generation, got)
        if got.finish_reasons[0] == "stop" and generation.spec.grammar in GRAMMARS:
            assert got.token_ids[0][-1] == END_ID
            text = tiny_reference.tokenizer.decode_str(got.token_ids[0][:-1])
            validate(json.loads(text), SCHEMAS[GRAMMARS.index(generation.spec.grammar)])
            num_stopped += 1
    assert num_stopped >= 0.9 * len(SCHEMAS)
    assert [got.token_ids for got in generated[len(generations) :]] == [got.token_ids for got in alone]


def test_choices_logprobs_penalties_and_min_tokens_go_together(
    system: LocalSystem, tiny_reference: GrammarReference
) -> None:
    """Log-probabilities stay those of the model's own logits; min_tokens holds back no end that must come."""
    ways = [
        replace(SAMPLED[0], num_logprobs=3),
        replace(SAMPLED[1], repetition_penalty=1.3, min_tokens=12),
        replace(SAMPLED[2], logit_bias=((40, 8.0), (50, -9.0)), bad_words=((41, 42),)),
    ]
    numbers = (0, 10, 15)
    generations = [asked(system, number, GRAMMARS[number], way, num_choices=3) for number in numbers for way in ways]
    generated = system.run(generations)
    for generation, got in zip(generations, generated, strict=True):
        check(tiny_reference, generation, got)
    of_first = generated[0].logprobs[0]
    assert all(position is not None and len(position.top) == 3 for position in of_first)
    ids = [token_id for token_id, _ in of_first[0].top]  # type: ignore[union-attr]
    allowed = set(tiny_reference.tokenizer.tokenize_str("truefalse"))
    assert not set(ids) <= allowed, "what the model would have said is no JSON"
    assert len({tuple(ids) for ids in generated[6].token_ids.values()}) == 3


SLEEPERS = [
    Grammar(grammar_text.json_schema(SCHEMAS[11]), begins_after=(BEGIN_ID,)),
    Grammar(grammar_text.lark(f'start: "[" /[a-z]/ "]" <[{DONE_ID}]>'), begins_after=(BEGIN_ID, 77), repeats=True),
    Grammar(grammar_text.choice(["a", "ab"]), begins_after=(BEGIN_ID, 300), repeats=True),
]


def test_a_grammar_sleeps_until_its_token_and_again_behind_its_text(
    system: LocalSystem, tiny_reference: GrammarReference
) -> None:
    often = ((BEGIN_ID, 9.0),)
    ways = [replace(way, logit_bias=often) for way in (SAMPLED[0], SAMPLED[2])]
    generations = [asked(system, n, grammar, way) for n, grammar in enumerate(SLEEPERS) for way in ways]
    num_begun = []
    for generation, got in zip(generations, system.run(generations), strict=True):
        check(tiny_reference, generation, got)
        num_begun.append(got.token_ids[0].count(BEGIN_ID))
        assert got.token_ids[0][0] != BEGIN_ID or num_begun[-1] > 1 or not generation.spec.grammar.repeats  # type: ignore[union-attr]
    assert min(num_begun) >= 1
    assert max(num_begun) > 2, "a grammar was seen to hold more than once"


def test_a_replay_goes_on_within_the_text(system: LocalSystem, tiny_reference: GrammarReference) -> None:
    """Decode loses all requests in mid-text, twice: the rest comes from prompt + output as a new prompt."""

    async def generate(generations: list[Generation]) -> list[list[int]]:
        router = await system.start_router(max_retries=3, retry_delay_s=0.01)
        num_seen = 0

        async def one(generation: Generation) -> list[int]:
            nonlocal num_seen
            ids = []
            async for batch in router.generate(generation):
                for token in batch:
                    ids.append(token.token_id)  # type: ignore[union-attr]
                    num_seen += 1
                    if num_seen in (3 * len(generations), 7 * len(generations)):
                        lose_all(system)
            return ids

        try:
            return await asyncio.gather(*(one(generation) for generation in generations))
        finally:
            await router.stop()

    grammars = [GRAMMARS[11], GRAMMARS[15], GRAMMARS[20], OTHERS[2], *SLEEPERS]
    generations = [
        asked(system, n, grammar, replace(SAMPLED[n % 3], logit_bias=((BEGIN_ID, 6.0),), bad_words=()))
        for n, grammar in enumerate(grammars)
    ]
    for generation, ids in zip(generations, asyncio.run(generate(generations)), strict=True):
        assert ids == tiny_reference.text(generation.spec), generation.spec


def lose_all(system: LocalSystem) -> None:
    engine = system.decode.engine

    def end() -> None:
        for request_id in list(engine.calls.by_id):
            engine.calls.end(request_id, RequestState.FAILED, CallStatus.KV_LOST, "the test wants it so")

    engine._inbox.put(end)


@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["preempted", "evicted and replayed"])
@pytest.mark.parametrize("lag", [0, 1])
def test_who_gave_way_goes_on_the_same(
    tiny_folder: Path, tiny_reference: GrammarReference, host_memory_bytes: int, lag: int
) -> None:
    changes: dict[str, Any] = {"kv_capacity_tokens": 192, "host_memory_bytes": host_memory_bytes}
    tight = tiny_settings("decode", tiny_folder, lag=lag, admission=OPTIMISTIC, **changes)
    with running(replace(tight, model=replace(tight.model, max_model_len=96)), None) as system:
        estimator = system.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(5)
        longer = Grammar(grammar_text.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 12}))
        generations = [asked(system, n % 2, longer, SAMPLED[n % 3]) for n in range(9)]
        generated = system.run(generations)
        preemption = system.decode.engine.scheduler.preemption
        assert (preemption.num_swapped if host_memory_bytes else preemption.num_evicted) > 0
        for generation, got in zip(generations, generated, strict=True):
            check(tiny_reference, generation, got)


OPTIONAL = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1100)}}
LIMITED = Grammar(grammar_text.json_schema({"type": "object", "properties": {"k": OPTIONAL}, "required": ["k"]}))


def test_a_limit_struck_in_mid_text_ends_that_request_alone(
    system: LocalSystem, tiny_reference: GrammarReference
) -> None:
    """The grammar is compiled: only what is inside of its object has more alternatives than one mask may have."""
    good, other = asked(system, 1, GRAMMARS[15], SAMPLED[0]), asked(system, 2, None, GREEDY)
    alone = system.run([other])[0].token_ids[0]
    bad = asked(system, 3, LIMITED, SAMPLED[0])

    async def all_three() -> Any:
        router = await system.start_router()
        try:
            return await asyncio.gather(*(drain(router, one) for one in (bad, good, other)), return_exceptions=True)
        finally:
            await router.stop()

    error, tokens, free = asyncio.run(all_three())
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (400, "grammar_limit")
    assert tokens == tiny_reference.text(good.spec)
    assert free == alone
    assert counted(system, "splitserve_grammar_failures", reason="limit") == 1
    assert all(built.engine.is_healthy(60.0) for built in system.engines)


def counted(system: LocalSystem, name: str, **labels: str) -> float:
    """Over all engines."""
    families = [family for built in system.engines for family in built.metrics_snapshot() if family["name"] == name]
    samples = [sample for family in families for sample in family["samples"] if sample[0] in ("", "_total", "_count")]
    return sum(value for _, has, value in samples if labels.items() <= has.items())


async def drain(router: Any, generation: Generation) -> list[int]:
    return [token.token_id async for batch in router.generate(generation) for token in batch]
