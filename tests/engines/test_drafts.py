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
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.sampling_params import SamplingParams
from tests.engines.drafting_system import CountedDrafts, OracleDrafter, Texts, draft_with, drafting
from tests.engines.local_system import Generated, LocalSystem
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import save_tiny_model, tiny_settings

LAYOUTS = ["colocated lag 0", "colocated lag 1", "1p1d lag 1", "two_lanes lag 0", "two_lanes lag 1"]
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


def assert_same(generated: list[Generated], expected: list[Generated]) -> None:
    """Tokens and reasons, and log-probabilities up to the order of sums."""
    for got, right in zip(generated, expected, strict=True):
        assert (got.token_ids, got.finish_reasons) == (right.token_ids, right.finish_reasons)
        for choice, logprobs in right.logprobs.items():
            for ours, theirs in zip(got.logprobs[choice], logprobs, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                    assert [id_ for id_, _ in ours.top] == [id_ for id_, _ in theirs.top]
        assert len(got.prompts) == len(right.prompts)


def at_rest(system: LocalSystem) -> None:
    asyncio.run(system.wait_for_baseline())


@pytest.mark.parametrize("num_drafts", [0, 2, 4, 7])
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


@pytest.mark.parametrize("num_drafts", [2, 7])
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
