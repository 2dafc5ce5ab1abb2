"""What the choice of tokens adds to a step, by how they are chosen: alone, by each rule, and with rows that differ."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.sampled_tokens import sample_tokens
from replicas.sampling.slot_state import SlotState
from scheduler.plan import RuleContext, SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams

_CONTEXT = 512  # tokens that a penalty looks back at, half of them output
# As many as the config allows by default, of ids that every vocabulary has.
_BIAS = tuple((token_id, 1.0) for token_id in range(300))
_BAD_WORDS = tuple(tuple(range(word, word + 1 + word % 3)) for word in range(128))
_ALLOWED = tuple(range(0, 20_480, 20))

# Each batch takes these in turns, one a row.
WAYS: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (SamplingParams(temperature=0.0),),
    "sampled": (SamplingParams(temperature=0.8, seed=1),),
    "top-p": (SamplingParams(temperature=0.8, top_p=0.95, seed=1),),
    "min-p": (SamplingParams(temperature=0.8, min_p=0.05, seed=1),),
    "penalties": (
        SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    ),
    "logit_bias": (SamplingParams(temperature=0.0, logit_bias=_BIAS),),
    "bad words": (SamplingParams(temperature=0.0, bad_words=_BAD_WORDS),),
    "allowed ids": (SamplingParams(temperature=0.0, allowed_token_ids=_ALLOWED),),
    "logprobs": (SamplingParams(temperature=0.0, num_logprobs=5),),
    "20 logprobs": (SamplingParams(temperature=0.0, num_logprobs=20),),
}
WAYS["mixed"] = tuple(params for way in WAYS.values() for params in way)
WAYS["all at once"] = (
    SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        seed=1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=_BIAS,
        bad_words=_BAD_WORDS,
        min_tokens=_CONTEXT,
        num_logprobs=5,
    ),
)


def sampling_times(vocab_size: int, batches: list[int], num_repeats: int) -> list[dict[str, Any]]:
    """One row for each batch: median milliseconds of each way. Blocks."""
    rows = []
    for batch in batches:
        logits = torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(0))
        rows.append({"batch": batch} | {name: _median_ms(logits, ways, num_repeats) for name, ways in WAYS.items()})
    return rows


def _median_ms(logits: torch.Tensor, ways: Sequence[SamplingParams], num_repeats: int) -> float:
    batch, vocab_size = logits.shape
    slots = SlotState(batch, 1, _CONTEXT + 1)
    rng = random.Random(0)
    ids = tuple(rng.randrange(vocab_size) for _ in range(_CONTEXT))
    context = RuleContext(ids, output_start=_CONTEXT // 2, stop_token_ids=frozenset({0}))
    inits = tuple(SlotInit(slot, 0, ways[slot % len(ways)], None, context) for slot in range(batch))
    slots.apply(StepPlan(0, inits, (), (), ()))
    places = [SamplePlace(slot, 0, _CONTEXT, slot) for slot in range(batch)]
    times_ms = []
    for _ in range(num_repeats):
        own = logits.clone()  # rules change them
        started_s = time.perf_counter()
        choice = sample_tokens(own, places, slots)
        choice.read_tokens(), choice.read_logprobs()
        times_ms.append(1000 * (time.perf_counter() - started_s))
    return statistics.median(times_ms)
