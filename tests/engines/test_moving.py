"""Running requests are moved between decode engines again and again: their texts are those of transformers, nothing is
computed twice, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.routing.generation import Generation
from replicas.grammars import grammar_text
from scheduler.beam_search import BeamParams
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams
from tests.engines.drafting_system import CountedDrafts, OracleDrafter, Texts, draft_with, drafting
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import GREEDY, Generated
from tests.engines.moving_system import MovingSystem
from tests.engines.tiny_model import tiny_settings
from tests.engines.tiny_tokenizer import END_ID

MAX_TOKENS = 48
ENDS = frozenset({END_ID})
PROMPTS = [
    [(7 * number + 13 * index) % 500 for index in range(length)] for number, length in enumerate([1, 16, 17, 70])
]
WAYS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=1.0, seed=2, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.7, top_k=40, seed=2**63 + 9, num_logprobs=3),
    SamplingParams(temperature=1.2, min_p=0.02, seed=4, repetition_penalty=1.2, num_logprobs=0),
    SamplingParams(temperature=0.9, seed=5, min_tokens=20, bad_words=((7, 8), (9,))),
]
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 4}
GRAMMARS = [
    None,
    None,
    Grammar(grammar_text.json_schema(WORDS, strict=False)),
    Grammar(grammar_text.lark('start: pair+\npair: /[a-z]/ "=" /[0-9]/ ";"')),
]
LAYOUTS = [
    "1p2d lag 1",
    pytest.param("1p2d lag 0", marks=pytest.mark.slow),
    "colocated lag 0",
    pytest.param("colocated lag 1", marks=pytest.mark.slow),
    pytest.param("two_lanes lag 0", marks=pytest.mark.slow),
    pytest.param("two_lanes lag 1", marks=pytest.mark.slow),
]


@contextmanager
def running(folder: Path, layout: str, **changes: Any) -> Iterator[MovingSystem]:
    changes = {"lag": int(layout[-1]), "max_batch_tokens": 64, "kv_capacity_tokens": 8192, **changes}
    if "two_lanes" in layout:
        changes["layout"] = "two_lanes"
    system = MovingSystem.tiny(folder, has_prefill="1p" in layout, **changes)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def system(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[MovingSystem]:
    with running(tiny_folder, request.param) as system:
        yield system


def mixed(system: MovingSystem, count: int, max_tokens: int = MAX_TOKENS) -> list[Generation]:
    """Greedy and seeded, of one choice and of three, free and constrained, with log-probabilities and penalties."""
    return [
        system.generation(
            PROMPTS[n % 4], max_tokens, WAYS[n % 6], 3 if n % 5 == 1 else 1, ENDS, grammar=GRAMMARS[n // 2 % 4]
        )
        for n in range(count)
    ]


def check(reference: GrammarReference, asked: list[Generation], generated: list[Generated]) -> None:
    for one, got in zip(asked, generated, strict=True):
        assert sorted(got.token_ids) == list(one.spec.choices)
        for choice, ids in got.token_ids.items():
            assert reference.is_text(one.spec, ids, choice), (one.spec, choice)
            assert got.finish_reasons[choice] == ("stop" if ids[-1] == END_ID else "length")
            scored = got.logprobs[choice]
            assert len(scored) == len(ids)
            assert all((score is None) == (one.spec.sampling.num_logprobs is None) for score in scored)


def test_texts_are_those_of_transformers(system: MovingSystem, tiny_reference: GrammarReference) -> None:
    asked = mixed(system, 24)
    check(tiny_reference, asked, system.run_moving(asked))
    print(f"{system.moved():.0f} moves, {system.moved('refused'):.0f} refused")
    assert system.moved() > 2
    assert not system.moved("lost")


def test_what_the_other_engine_has_of_the_prompt_is_not_read(
    tiny_folder: Path, tiny_reference: GrammarReference
) -> None:
    """To and fro: each engine has had the prompt."""
    with running(tiny_folder, "1p2d lag 1") as system:
        asked = [system.generation(PROMPTS[3], 200)]
        check(tiny_reference, asked, system.run_moving(asked, every_s=0.001))
        num_moves = system.moved()
        num_found = sum(one.engine.scheduler.prefixes.num_found_tokens for one in system.decodes.values())  # type: ignore[union-attr]
    assert num_moves > 2
    assert num_found >= 64 * (num_moves - 2)


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_with_drafts(lag: int, tiny_folder: Path, tiny_reference: GrammarReference) -> None:
    """Choices that drafts have taken to different positions; some drafts hold, some do not, and some are in flight."""
    decode = drafting(tiny_settings("decode", tiny_folder, lag=lag, kv_capacity_tokens=8192))
    system = MovingSystem([decode, decode], tiny_settings("prefill", tiny_folder, lag=lag))
    asked = mixed(system, 12)
    expected = system.run(asked)
    texts: Texts = {
        (one.spec.prompt_ids, one.spec.sampling.seed, choice): ids
        for one, got in zip(asked, expected, strict=True)
        for choice, ids in got.token_ids.items()
        if one.spec.grammar is None
    }
    for built in system.decodes.values():
        draft_with(built, 3, OracleDrafter(texts, 0.6))
    CountedDrafts.take()
    check(tiny_reference, asked, system.run_moving([replace(one) for one in asked]))
    num_drafted, num_held = CountedDrafts.take()
    asyncio.run(system.wait_for_baseline())
    system.close()
    assert num_drafted > num_held > 20
    assert system.moved() > 2


def test_beams_stay_where_they_are(tiny_folder: Path) -> None:
    with running(tiny_folder, "1p2d lag 1") as system:
        asked = [system.generation(PROMPTS[n], 24, beam=BeamParams(3), num_choices=2) for n in range(4)]
        expected = [got.token_ids for got in system.run(asked)]
        again = [system.generation(one.spec.prompt_ids, 24, beam=BeamParams(3), num_choices=2) for one in asked]
        assert [got.token_ids for got in system.run_moving(again)] == expected
        assert not system.moved()
