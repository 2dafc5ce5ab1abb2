"""What drafts are made by, and how a plan's rows are computed with them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from replicas.sampling.rules.token_masks import TokenMasks
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from replicas.speculation.drafting_runner import computed_rows
from replicas.speculation.history import TokenHistory
from replicas.speculation.ngram_drafter import NgramDrafter, last_occurrence
from scheduler.plan import RuleContext, SampleTarget, Slice, SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams


def history_of(*texts: list[int], predicted: tuple[int, ...] = ()) -> TokenHistory:
    history = TokenHistory(len(texts), max_len=64)
    for slot, ids in enumerate(texts):
        history.start(started(slot, ids, predicted))
    return history


def started(slot: int, ids: list[int], predicted: tuple[int, ...] = (), last_token: int | None = None) -> SlotInit:
    context = RuleContext(tuple(ids), len(ids), predicted_ids=predicted)
    return SlotInit(slot, 0, SamplingParams(), last_token, context, may_draft=True)


def brute(ids: list[int], ngram_min: int, ngram_max: int) -> int:
    for size in range(ngram_max, ngram_min - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[len(ids) - size :]:
                return start + size
    return len(ids)


@pytest.mark.parametrize(("ngram_min", "ngram_max"), [(1, 1), (1, 3), (2, 2), (2, 4), (3, 5)])
def test_the_last_occurrence_of_the_longest_n_gram(ngram_min: int, ngram_max: int) -> None:
    rng = random.Random(5)
    num_found = 0
    for _ in range(2000):
        ids = [rng.randrange(rng.choice([1, 2, 3, 8])) for _ in range(rng.randint(1, 24))]
        found = last_occurrence(np.array(ids, dtype=np.int32), ngram_min, ngram_max)
        assert found == brute(ids, ngram_min, ngram_max), ids
        num_found += found < len(ids)
    assert 300 < num_found < 2000


def test_drafts_are_what_followed() -> None:
    history = history_of([1, 2, 3, 4, 5, 6, 9, 1, 2], [7, 7, 8], [5, 5, 5])
    drafts = NgramDrafter(history, 2, 4).draft([DraftRow(0, 0, 4), DraftRow(1, 0, 4), DraftRow(2, 0, 4)])
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == [[3, 4, 5, 6], [NO_DRAFT] * 4, [5, *[NO_DRAFT] * 3]]
    assert NgramDrafter(history, 2, 4).draft([DraftRow(0, 0, 2)]).tolist() == [[3, 4]]
    assert NgramDrafter(history, 2, 4).draft([DraftRow(1, 0, 4)]).shape == (1, 0), "nothing to find costs no columns"
    with pytest.raises(ValueError, match="n-grams of 3 to 2"):
        NgramDrafter(history, 3, 2)


def test_what_is_expected_stands_in_front() -> None:
    """It is found where the text itself has nothing like it, and only then: the text is nearer."""
    drafter = NgramDrafter(history_of([1, 2], predicted=(8, 1, 2, 3, 4)), 2, 4)
    assert drafter.draft([DraftRow(0, 0, 2)]).tolist() == [[3, 4]]
    drafter = NgramDrafter(history_of([1, 2, 6, 1, 2], predicted=(8, 1, 2, 3, 4)), 2, 4)
    assert drafter.draft([DraftRow(0, 0, 2)]).tolist() == [[6, 1]]


def test_a_history_is_what_counts() -> None:
    history = history_of([1, 2], [3], [4])
    history.append(int64(0, 2), int64([10, 11, 12], [20, 21, 22]), int64(1, 3))
    assert [history.of(slot).tolist() for slot in range(3)] == [[1, 2, 10], [3], [4, 20, 21, 22]]
    history.start(started(0, [5, 6], last_token=7))
    assert history.of(0).tolist() == [5, 6, 7]
    history.start(SlotInit(2, 0, SamplingParams(), None, RuleContext((1, 2, 3))))
    assert [slot in history for slot in range(3)] == [True, True, False], "of one that may not draft nothing is kept"


def int64(*values: object) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def test_what_is_expected_is_cut_before_there_is_no_room_for_the_text() -> None:
    history = TokenHistory(1, max_len=8)
    history.start(started(0, [1, 2, 3], predicted=tuple(range(100, 200))))
    history.append(int64(0), int64([4, 5, 6, 7, 8]), int64(5))
    assert history.of(0).tolist() == [*range(100, 108), 1, 2, 3, 4, 5, 6, 7, 8]


def test_masks_are_by_rows_of_the_plan_as_it_was_made() -> None:
    """Two of four drafts found, none of three; then a prompt with two choices."""
    slices = (
        Slice("a", 0, 0, 5, 3, 3, (1, 2), num_drafts=4),
        Slice("b", 0, 1, 5, 1, 1, num_drafts=3),
        Slice("c", 0, 2, 5),
        Slice.of_prompt("d", 3, 0, (1, 2), (SampleTarget(3, 0), SampleTarget(4, 1))),
    )
    rows = computed_rows(StepPlan(0, (), (), (), slices, has_drafts=True))
    assert rows == [0, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5, 6]
    words = np.arange(6, dtype=np.int32).reshape(3, 2)
    masks = TokenMasks((9, 10, 11), words).at(rows)
    assert masks.rows == (4, 5, 6)
    assert masks.words is words
