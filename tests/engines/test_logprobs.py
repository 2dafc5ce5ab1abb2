"""Log-probabilities of tokens and prompts equal a float32 forward pass of transformers, wherever they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import TokenLogprobs
from tests.engines.local_system import Generated, LocalSystem, settings
from tests.golden.golden_set import load_goldens
from tests.model_folder import model_folder

TOLERANCE = 1e-4
NUM_TOP = 5
STEP_TOKENS = 48  # so that prompts come in chunks, which begin and end anywhere
PROMPTS = [golden.prompt_ids for golden in load_goldens() if 60 <= len(golden.prompt_ids) <= 200][:2]
PROMPTS += [[4093], [4093, 30], list(range(1000, 1048)), list(range(1000, 1049))]


@dataclass
class Reference:
    """transformers' own model. Each text is computed once: every layout is compared with it."""

    model: Any
    computed: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """float32 [n, V]: row i is of what follows token i."""
        if tuple(ids) not in self.computed:
            logits: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
            self.computed[tuple(ids)] = logits.float().log_softmax(-1)
        return self.computed[tuple(ids)]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval())


@pytest.fixture(scope="module", params=["1p1d lag 1", "colocated lag 1"])
def system(request: pytest.FixtureRequest) -> Iterator[LocalSystem]:
    changes = {"lag": int(request.param[-1]), "max_batch_tokens": STEP_TOKENS}
    prefill = settings("prefill", **changes) if "1p1d" in request.param else None
    system = LocalSystem(settings("decode", **changes), prefill)
    yield system
    system.close()


def check(got: TokenLogprobs | None, expected: torch.Tensor, token_id: int, num_top: int) -> None:
    """expected: float32 [V]."""
    assert got is not None
    assert got.logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
    assert len(got.top) == num_top
    best = expected.topk(num_top).values.tolist()
    assert [logprob for _, logprob in got.top] == pytest.approx(best, abs=TOLERANCE)
    # Two that are almost equally likely may change places: an id is judged by its own.
    assert [float(expected[t]) for t, _ in got.top] == pytest.approx(best, abs=TOLERANCE)
    assert len({t for t, _ in got.top}) == num_top


def check_generated(reference: Reference, prompt: list[int], got: Generated, num_top: int) -> None:
    for choice, token_ids in got.token_ids.items():
        expected = reference.logprobs([*prompt, *token_ids])
        for index, token_id in enumerate(token_ids):
            check(got.logprobs[choice][index], expected[len(prompt) + index - 1], token_id, num_top)


def check_prompt(reference: Reference, prompt: list[int], got: Generated, num_top: int) -> None:
    (scored,) = got.prompts
    assert len(scored.positions) == len(prompt)
    assert scored.positions[0] is None
    expected = reference.logprobs(prompt)
    for index in range(1, len(prompt)):
        check(scored.positions[index], expected[index - 1], prompt[index], num_top)


def test_tokens_and_prompts_equal_transformers(system: LocalSystem, reference: Reference) -> None:
    greedy = SamplingParams(temperature=0.0, num_logprobs=NUM_TOP, num_prompt_logprobs=NUM_TOP)
    plain = SamplingParams(temperature=0.0)
    generations = [system.generation(prompt, 6, greedy) for prompt in PROMPTS]
    others = [system.generation(prompt, 6, plain) for prompt in PROMPTS]
    generated = system.run([*generations, *others])
    for prompt, got, without in zip(PROMPTS, generated[: len(PROMPTS)], generated[len(PROMPTS) :], strict=True):
        check_generated(reference, prompt, got, NUM_TOP)
        check_prompt(reference, prompt, got, NUM_TOP)
        assert got.token_ids == without.token_ids
        assert without.prompts == []
        assert set(without.logprobs[0]) == {None}
    # Asked again: the same tokens; the numbers may round otherwise, as a step may still hold an ended request's row.
    (again,) = system.run(generations[:1])
    assert again.token_ids == generated[0].token_ids
    check_generated(reference, PROMPTS[0], again, NUM_TOP)
    check_prompt(reference, PROMPTS[0], again, NUM_TOP)


def test_sampled_choices_are_judged_by_the_models_own_logits(system: LocalSystem, reference: Reference) -> None:
    params = SamplingParams(
        1.5, 40, 0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.5, num_logprobs=2, num_prompt_logprobs=0
    )
    (got,) = system.run([system.generation(PROMPTS[1], 8, params, num_choices=3)])
    assert len({tuple(ids) for ids in got.token_ids.values()}) == 3
    check_generated(reference, PROMPTS[1], got, 2)
    check_prompt(reference, PROMPTS[1], got, 0)


def test_only_the_chosen_token_and_one_token_at_all(system: LocalSystem, reference: Reference) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=1)
    (got,) = system.run([system.generation(PROMPTS[0], 1, params)])
    assert got.finish_reasons == {0: "length"}
    check_generated(reference, PROMPTS[0], got, 0)
    check_prompt(reference, PROMPTS[0], got, 1)


def test_forbidden_tokens_keep_the_models_log_probability(system: LocalSystem, reference: Reference) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=1, allowed_token_ids=(40, 41, 42))
    (got,) = system.run([system.generation(PROMPTS[0], 4, params)])
    assert set(got.token_ids[0]) <= {40, 41, 42}
    check_generated(reference, PROMPTS[0], got, 1)
    first = got.logprobs[0][0]
    assert first is not None
    assert first.top[0][0] not in (40, 41, 42)
