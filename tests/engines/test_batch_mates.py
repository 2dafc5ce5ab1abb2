"""Row C04: what a greedy request gets alone, and among 31 others that come, go and choose in other ways; and what it
gets when the beginning of its prompt was found in a cache.

What is promised: the same text up to the order of floating-point sums, which differs with the shape of a batch, and
with where in a prompt computing begins. So a text may only part from the one it has alone and cold where two tokens are
as good as equally likely there; how often that happens is printed.
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
LONG_PROMPTS = [golden.prompt_ids for golden in load_goldens() if 40 <= len(golden.prompt_ids) <= 700]
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


def _salted(generation: Generation, salt: int) -> Generation:
    """Finds only what others with this salt have left."""
    return replace(generation, spec=replace(generation.spec, cache_salt=salt.to_bytes(16, "big")))


def _parts(alone: Generated, other: Generated) -> bool:
    """Whether it parts from the text that it has alone and cold; there two tokens are as good as equally likely."""
    mine, theirs = alone.token_ids[0], other.token_ids[0]
    assert len(mine) == len(theirs) == NUM_TOKENS
    position = next((i for i in range(NUM_TOKENS) if mine[i] != theirs[i]), None)
    if position is None:
        return False
    scores = alone.logprobs[0][position]
    assert scores is not None
    (_, best), (_, second) = scores.top
    assert best - second < NEAR_TIE, (position, scores)
    return True


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_c04_a_greedy_text_parts_only_at_a_near_tie(system: LocalSystem) -> None:
    """Each is computed whole: in a round nobody finds what was left by another one."""
    greedy = replace(GREEDY, num_logprobs=2)
    alone = [system.run([_salted(system.generation(prompt, NUM_TOKENS, greedy), 1)])[0] for prompt in PROMPTS]
    parted = 0
    for round_ in range(NUM_ROUNDS):
        mine = [_salted(system.generation(prompt, NUM_TOKENS, GREEDY), 2 + round_) for prompt in PROMPTS]
        among = system.run([*mine, *_others(system, round_)])[: len(PROMPTS)]
        assert [generation.finding.num_tokens for generation in mine] == [0] * len(PROMPTS)
        parted += sum(_parts(one, other) for one, other in zip(alone, among, strict=True))
    print(f"C04: {parted} of {NUM_ROUNDS * len(PROMPTS)} texts of {NUM_TOKENS} tokens parted from what they are alone")


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_c04_a_warm_text_parts_from_a_cold_one_only_at_a_near_tie(system: LocalSystem) -> None:
    """All of the prompt but its last block was found, or as much of it as another prompt has in common with it."""
    greedy = replace(GREEDY, num_logprobs=2)
    parted = num_found = num_warm = 0
    for number, prompt in enumerate(LONG_PROMPTS):
        cold = _salted(system.generation(prompt, NUM_TOKENS, greedy), 1000 + number)
        warm = _salted(system.generation(prompt, NUM_TOKENS, GREEDY), 1000 + number)
        begun = _salted(system.generation([*prompt[: len(prompt) // 2], 7], 1, GREEDY), 2000 + number)
        half = _salted(system.generation(prompt, NUM_TOKENS, GREEDY), 2000 + number)
        alone, again, _, later = (system.run([generation])[0] for generation in (cold, warm, begun, half))
        assert (cold.finding.num_tokens, begun.finding.num_tokens) == (0, 0)
        for text, generation in ((again, warm), (later, half)):
            parted += _parts(alone, text)
            num_found += generation.finding.num_tokens
            num_warm += generation.finding.num_tokens > 0
    assert num_warm == 2 * len(LONG_PROMPTS), "each found something"
    print(
        f"C04: {parted} of {num_warm} texts of {NUM_TOKENS} tokens, {num_found} prompt tokens found, parted from cold"
    )
