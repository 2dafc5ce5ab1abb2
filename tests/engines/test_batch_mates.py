"""Row C04: what a greedy request gets alone, and among 31 others that come, go and choose in other ways.

What is promised: the same text up to the order of floating-point sums, which differs with the shape of a batch. So a
text may only part from the one it has alone where two tokens are as good as equally likely there; how often that
happens is printed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.routing.generation import Generation
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem, settings
from tests.golden.golden_set import load_goldens

NUM_TOKENS = 32
NUM_ROUNDS = 5
BATCH = 32
# In natural logarithm. Float32 logits of this model differ by some 1e-5 between batches.
NEAR_TIE = 1e-3
PROMPTS = [golden.prompt_ids for golden in load_goldens() if 10 <= len(golden.prompt_ids) <= 60][:4]
WAYS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, top_p=0.9, min_p=0.02, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=5, num_logprobs=20),
]


@pytest.fixture(scope="module", params=["split", "colocated"])
def system(request: pytest.FixtureRequest) -> Iterator[LocalSystem]:
    prefill = settings("prefill") if request.param == "split" else None
    system = LocalSystem(settings("decode"), prefill)
    yield system
    system.close()


def _others(system: LocalSystem, round_: int) -> list[Generation]:
    rng = random.Random(round_)
    return [
        system.generation([rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 70))], rng.randrange(1, 40), way)
        for way in rng.choices(WAYS, k=BATCH - len(PROMPTS))
    ]


def _where_they_part(alone: Generated, among: Generated) -> int | None:
    mine, theirs = alone.token_ids[0], among.token_ids[0]
    assert len(mine) == len(theirs) == NUM_TOKENS
    return next((i for i in range(NUM_TOKENS) if mine[i] != theirs[i]), None)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_c04_a_greedy_text_parts_only_at_a_near_tie(system: LocalSystem) -> None:
    greedy = replace(GREEDY, num_logprobs=2)
    alone = [system.run([system.generation(prompt, NUM_TOKENS, greedy)])[0] for prompt in PROMPTS]
    parted = 0
    for round_ in range(NUM_ROUNDS):
        mine = [system.generation(prompt, NUM_TOKENS, GREEDY) for prompt in PROMPTS]
        among = system.run([*mine, *_others(system, round_)])[: len(PROMPTS)]
        for one, other in zip(alone, among, strict=True):
            position = _where_they_part(one, other)
            if position is None:
                continue
            parted += 1
            scores = one.logprobs[0][position]
            assert scores is not None
            (_, best), (_, second) = scores.top
            assert best - second < NEAR_TIE, (position, scores)
    print(f"C04: {parted} of {NUM_ROUNDS * len(PROMPTS)} texts of {NUM_TOKENS} tokens parted from what they are alone")
