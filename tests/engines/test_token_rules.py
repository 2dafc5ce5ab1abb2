"""Texts chosen by rules are the reference's, wherever they are computed and whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from replicas.messages import CallStatus, GenerationSpec, Token
from replicas.sampling.draw import SamplingBatch, sample
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.length_estimator import LengthEstimator
from scheduler.request import RequestState
from scheduler.sampling_params import SamplingParams
from scheduler.thinking_budget import ThinkingBudget
from tests.engines.local_system import Generated, LocalSystem
from tests.engines.tiny_model import save_tiny_model, tiny_settings
from tests.replicas.rule_reference import Row, expected

LAYOUTS = ["1p1d lag 0", "1p1d lag 1", "colocated lag 0", "colocated lag 1"]
PROMPTS = [[(7 * number + 13 * index) % 40 for index in range(5 + 9 * number)] for number in range(4)]
STOPS = frozenset(range(0, 512, 8))
RULES = [
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.7),
    SamplingParams(min_tokens=25, logit_bias=((16, 6.0), (24, 6.0))),
    SamplingParams(
        logit_bias=((3, 5.0), (4, 5.0), (5, 5.0)),
        bad_words=((3,), (4, 5), (5, 4, 4), (4, 4, 4)),
        allowed_token_ids=tuple(range(120)),
        min_tokens=15,
        repetition_penalty=1.05,
        presence_penalty=0.2,
        frequency_penalty=0.1,
    ),
    SamplingParams(thinking=ThinkingBudget(6, 42, 41, True), repetition_penalty=1.2),
]
GREEDY = [replace(rule, temperature=0.0) for rule in RULES]
SAMPLED = [
    replace(rule, temperature=0.9, top_k=60, top_p=0.97, min_p=0.01, seed=10 + n) for n, rule in enumerate(RULES)
]
OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)


@dataclass
class Reference:
    """transformers' own model, one whole forward pass a token. Each text once: every layout is compared with it."""

    model: Any
    texts: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def text(self, spec: GenerationSpec, choice: int) -> list[int]:
        key = (spec.prompt_ids, spec.max_tokens, spec.stop_token_ids, spec.sampling, choice)
        if key not in self.texts:
            self.texts[key] = self._text(spec, choice)
        return self.texts[key]

    @torch.inference_mode()
    def _text(self, spec: GenerationSpec, choice: int) -> list[int]:
        output: list[int] = []
        while len(output) < spec.max_tokens:
            ids = [*spec.prompt_ids, *output]
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            row = Row(spec.sampling, spec.prompt_ids, tuple(output), 0, spec.stop_token_ids)
            batch = SamplingBatch.from_rows([(spec.sampling, choice, len(ids))])
            output.append(int(sample(expected(logits, row)[None], batch)))
            if output[-1] in spec.stop_token_ids:
                break
        return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@contextmanager
def running(decode: EngineSettings, prefill: EngineSettings | None) -> Iterator[LocalSystem]:
    system = LocalSystem(decode, prefill)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def system(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalSystem]:
    changes = {"lag": int(request.param[-1]), "max_batch_tokens": 32}
    prefill = tiny_settings("prefill", folder, **changes) if "1p1d" in request.param else None
    with running(tiny_settings("decode", folder, **changes), prefill) as system:
        yield system


def check(reference: Reference, generation: Generation, got: Generated) -> None:
    spec = generation.spec
    for choice in spec.choices:
        assert got.token_ids[choice] == reference.text(spec, choice), (spec, choice)


def test_texts_are_the_references(system: LocalSystem, reference: Reference) -> None:
    specs = [
        system.generation(prompt, 30, params, stop_token_ids=STOPS if params.min_tokens else frozenset())
        for params in (*GREEDY, *SAMPLED)
        for prompt in PROMPTS[:2]
    ]
    specs += [system.generation(PROMPTS[3], 30, params) for params in (SamplingParams(0.0), SamplingParams(seed=3))]
    generated = system.run(specs)
    for spec, got in zip(specs, generated, strict=True):
        check(reference, spec, got)
        if spec.spec.sampling.min_tokens:
            assert len(got.token_ids[0]) >= spec.spec.sampling.min_tokens
    ended_early = [got for got in generated if got.finish_reasons[0] == "stop"]
    assert ended_early, "min_tokens is seen to work only where stop tokens are wanted"


def test_forked_choices_have_histories_of_their_own(system: LocalSystem, reference: Reference) -> None:
    specs = [system.generation(PROMPTS[2], 25, params, num_choices=3) for params in SAMPLED]
    for spec, got in zip(specs, system.run(specs), strict=True):
        check(reference, spec, got)
        assert len({tuple(ids) for ids in got.token_ids.values()}) == 3


def test_a_replay_goes_on_as_if_nothing_had_happened(system: LocalSystem, reference: Reference) -> None:
    """Decode loses a request after ten tokens, twice: the rest comes from prompt + output as a new prompt."""

    async def generate(generation: Generation) -> list[Token]:
        router = await system.start_router(max_retries=3, retry_delay_s=0.01)
        tokens = []
        try:
            async for batch in router.generate(generation):
                for token in batch:
                    assert isinstance(token, Token)
                    tokens.append(token)
                    if len(tokens) in (10, 20):
                        lose_all(system)
        finally:
            await router.stop()
        return tokens

    for params in (GREEDY[3], SAMPLED[0], SAMPLED[1], SAMPLED[2]):
        num_logprobs = replace(params, num_logprobs=1, num_prompt_logprobs=None)
        spec = system.generation(
            PROMPTS[1], 40, num_logprobs, stop_token_ids=STOPS if params.min_tokens else frozenset()
        )
        tokens = asyncio.run(generate(spec))
        assert [token.token_id for token in tokens] == reference.text(spec.spec, 0)
        assert all(token.logprobs is not None for token in tokens)


def lose_all(system: LocalSystem) -> None:
    engine = system.decode.engine

    def end() -> None:
        for request_id in list(engine.calls.by_id):
            engine.calls.end(request_id, RequestState.FAILED, CallStatus.KV_LOST, "the test wants it so")

    engine._inbox.put(end)


@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["preempted", "evicted and replayed"])
def test_who_gave_way_goes_on_the_same(folder: Path, reference: Reference, host_memory_bytes: int) -> None:
    changes: dict[str, Any] = {"kv_capacity_tokens": 320, "host_memory_bytes": host_memory_bytes}
    tight = tiny_settings("decode", folder, lag=1, admission=OPTIMISTIC, **changes)
    with running(replace(tight, model=replace(tight.model, max_model_len=128)), None) as system:
        estimator = system.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(5)
        rules = [replace(params, min_tokens=0) for params in (*GREEDY, *SAMPLED)]
        specs = [system.generation(PROMPTS[0], 60, params, num_choices=1 + n // 6) for n, params in enumerate(rules)]
        generated = system.run(specs)
        preemption = system.decode.engine.scheduler.preemption
        assert (preemption.num_swapped if host_memory_bytes else preemption.num_evicted) > 0
        for spec, got in zip(specs, generated, strict=True):
            check(reference, spec, got)


def test_rules_that_leave_nothing_end_their_own_request_only(system: LocalSystem, reference: Reference) -> None:
    impossible = SamplingParams(0.0, allowed_token_ids=(8,), bad_words=((8,),))
    good = system.generation(PROMPTS[0], 12, GREEDY[0])

    async def both() -> Any:
        router = await system.start_router()
        try:
            bad = system.generation(PROMPTS[1], 5, impossible)
            return await asyncio.gather(drain(router, bad), drain(router, good), return_exceptions=True)
        finally:
            await router.stop()

    error, tokens = asyncio.run(both())
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (400, "nothing_allowed")
    assert tokens == reference.text(good.spec, 0)


async def drain(router: Any, generation: Generation) -> list[int]:
    return [token.token_id async for batch in router.generate(generation) for token in batch]
