"""The bundled model's goldens, and its sampled requests, with drafts of every kind: texts as without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from replicas.speculation.drafter import Drafter
from scheduler.sampling_params import SamplingParams
from tests.engines.drafting_system import CountedDrafts, OracleDrafter, Texts, draft_with, drafting
from tests.engines.local_system import LocalSystem, settings
from tests.golden.golden_set import Golden, load_goldens, load_sampled_requests
from tests.model_folder import model_folder

GOLDENS = load_goldens()


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def system(request: pytest.FixtureRequest) -> Iterator[LocalSystem]:
    decode = settings("decode", lag=request.param, max_running_sequences=16, kv_capacity_tokens=8192)
    decode = replace(decode, model=replace(decode.model, max_model_len=2048))
    system = LocalSystem(drafting(decode), None)
    yield system
    system.close()


def _oracle(goldens: list[Golden], right: float) -> Drafter:
    texts: Texts = {(tuple(golden.prompt_ids), 0, 0): golden.output_ids for golden in goldens}
    return OracleDrafter(texts, right)


def _check(system: LocalSystem, goldens: list[Golden], num_drafts: int, drafter: Drafter | None) -> None:
    draft_with(system.decode, num_drafts, drafter)
    CountedDrafts.take()
    asked = [system.generation(golden.prompt_ids, len(golden.output_ids), timeout_s=3000.0) for golden in goldens]
    generated = system.run(asked, queue_s=3000.0)
    ties = [golden.check(got.token_ids[0]) for golden, got in zip(goldens, generated, strict=True)]
    num_drafted, num_held = CountedDrafts.take()
    num_ties = sum(tie is not None for tie in ties)
    print(f"k {num_drafts}: {num_drafted} drafted, {num_held} held, {len(goldens)} prompts, {num_ties} near ties")
    assert num_held > 0 or not num_drafts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_some_goldens(system: LocalSystem, request: pytest.FixtureRequest) -> None:
    """A few, and each drafter with one lag: tests/engines/test_drafts.py has both with both, on the tiny model."""
    goldens = GOLDENS[::18]
    if request.node.callspec.params["system"]:
        _check(system, goldens, 4, None)
    else:
        _check(system, goldens, 7, _oracle(goldens, 0.8))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_drafts", [0, 2, 4, 7])
@pytest.mark.parametrize("right", [None, 0.5, 0.9], ids=["n-grams", "half right", "mostly right"])
def test_every_golden(system: LocalSystem, num_drafts: int, right: float | None) -> None:
    _check(system, GOLDENS, num_drafts, None if right is None else _oracle(GOLDENS, right))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_sampled_requests(system: LocalSystem) -> None:
    """Against the same engine without drafts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
    asked = []
    for number, one in enumerate(load_sampled_requests()):
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
        values = {name: one[name] for name in (*names, "repetition_penalty") if one.get(name) is not None}
        prompt = one["prompt"] if isinstance(one["prompt"], list) else tokenizer(one["prompt"])["input_ids"]
        sampling = SamplingParams(**{"seed": number, **values})
        asked.append(system.generation(prompt, 64, sampling, num_choices=one.get("n") or 1, timeout_s=3000.0))
    draft_with(system.decode, 0)
    expected = system.run(asked)
    texts: Texts = {
        (tuple(a.spec.prompt_ids), a.spec.sampling.seed, choice): ids
        for a, got in zip(asked, expected, strict=True)
        for choice, ids in got.token_ids.items()
    }
    for num_drafts in (2, 4, 7):
        for drafter in (None, OracleDrafter(texts, 0.7)):
            draft_with(system.decode, num_drafts, drafter)
            got_texts = [got.token_ids for got in system.run(asked)]
            assert got_texts == [right.token_ids for right in expected]
