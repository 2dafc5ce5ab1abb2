"""An engine with drafts on a card, in float32: every text is transformers' own, and steps have been saved.

On an H200 some 25 s for each layout, most of it the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize
from benchmarks.gpu.speculative_pieces import count_drafts, ngram_drafts
from scheduler.lane_split import LaneObjectives
from scheduler.sampling_params import SamplingParams
from tests.golden.golden_set import load_goldens
from tests.gpu import served_texts
from tests.model_folder import model_folder

pytestmark = pytest.mark.timeout(900)

MAX_MODEL_LEN, NUM_AT_ONCE = 2048, 60  # no more rows than may have drafts
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=77)


@pytest.fixture(scope="module", params=[None, LaneObjectives()], ids=["one lane", "two lanes"])
def lanes(request: pytest.FixtureRequest) -> LaneObjectives | None:
    served_texts.allow_no_rounding()
    lanes: LaneObjectives | None = request.param
    return lanes


def make_engine(lanes: LaneObjectives | None, constant: int | None) -> BareEngine:
    """constant: drafts of each row; None: there are none."""
    size = EngineSize(NUM_AT_ONCE, MAX_MODEL_LEN, 1024, 65_536)
    drafts = None if constant is None else ngram_drafts(constant)
    return BareEngine(model_folder(), "float32", "auto", size, 1, lanes=lanes, drafts=drafts)


@pytest.fixture(scope="module")
def drafting(lanes: LaneObjectives | None) -> Iterator[BareEngine]:
    with make_engine(lanes, 4) as engine:
        yield engine


def test_goldens(drafting: BareEngine) -> None:
    """All at once, beside each other's prompts; then one alone, whose steps are those of a few tokens."""
    goldens = [golden for golden in load_goldens() if len(golden.prompt_ids) + 64 <= MAX_MODEL_LEN]
    counts = count_drafts(drafting)
    for some in (goldens[:NUM_AT_ONCE], goldens[NUM_AT_ONCE:], goldens[:1]):
        streams = drafting.run([golden.prompt_ids for golden in some], [64] * len(some), GREEDY)
        for golden, stream in zip(some, streams, strict=True):
            golden.check(stream.tokens)
    print(f"{len(goldens)} goldens: {counts}")
    assert counts["drafted"] > 100
    assert counts["held"] > 30


def test_sampled_texts_are_those_without_drafts(drafting: BareEngine, lanes: LaneObjectives | None) -> None:
    """The noise is that of each token's place, wherever a draft stands. But for sums in another order, which a text in
    hundreds may see: no more than one does."""
    goldens = [golden for golden in load_goldens() if 8 <= len(golden.prompt_ids) <= 400][:40]
    prompts = [golden.prompt_ids for golden in goldens]
    texts = [stream.tokens for stream in drafting.run(prompts, [48] * len(prompts), SAMPLED)]
    ruled = replace(SAMPLED, repetition_penalty=1.2)
    of_rules = [stream.tokens for stream in drafting.run(prompts[:8], [32] * 8, ruled)]
    torch.cuda.empty_cache()
    with make_engine(lanes, None) as plain:
        expected = [stream.tokens for stream in plain.run(prompts, [48] * len(prompts), SAMPLED)]
        assert [stream.tokens for stream in plain.run(prompts[:8], [32] * 8, ruled)] == of_rules
    assert sum(text != other for text, other in zip(texts, expected, strict=True)) <= 1
