"""Kernels around a step with drafts: n-grams as NumPy finds them, what rows feed, and which drafts count."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from replicas.sampling.sample_place import SamplePlace, counting
from replicas.speculation.drafter import NO_DRAFT
from replicas.speculation.ngram_drafter import last_occurrence

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.draft_acceptance import accept_drafts, follow_tokens
from replicas.kernels.ngram_search import follow_ngrams
from replicas.kernels.row_feed import FedRows, PlannedRows, feed_rows, locate_rows
from replicas.kernels.slot_columns import BLOCK_TABLE, HISTORY, LAST_TOKEN, LENGTH

pytestmark = pytest.mark.interpreted

WIDTH = 96  # of a history
NUM_SLOTS = 6


def make_state(device: torch.device) -> torch.Tensor:
    state = torch.randint(0, 9, (NUM_SLOTS + 1, BLOCK_TABLE + 3), generator=torch.Generator().manual_seed(1))
    state[:, LENGTH] = -1
    state[:, HISTORY] = 0
    return state.to(device)


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("ngram_min", "ngram_max"), [(2, 4), (1, 3), (3, 3)])
def test_ngrams_on_the_device_are_those_of_numpy(device: torch.device, ngram_min: int, ngram_max: int) -> None:
    """Every length up to some; few kinds of tokens, so that there is much to choose from; and more than a program's."""
    rng = random.Random(ngram_min)
    texts = [[rng.randrange(kinds) for _ in range(length)] for length in range(13) for kinds in (1, 2, 3)]
    texts += [[rng.randrange(kinds) for _ in range(length)] for length in (2040, 2049, 4100) for kinds in (3, 40)]
    # Nothing of the last one's end but at its very beginning; and behind a text something that is not its own.
    texts += [[7, 8, 9, *range(100, 2300), 7, 8, 9], [*range(50)]]
    history = torch.full((len(texts), 5000), 1, dtype=torch.int32, device=device)
    state = torch.zeros(len(texts), BLOCK_TABLE + 3, dtype=torch.int64, device=device)
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = int32(text, device)
        state[slot, HISTORY] = len(text)
    slots = list(range(len(texts)))
    rng.shuffle(slots)
    wanted = [1 + rng.randrange(7) for _ in slots]
    drafts = follow_ngrams(history, state, int32(slots, device), int32(wanted, device), 7, ngram_min, ngram_max)
    num_found = 0
    for slot, count, found in zip(slots, wanted, drafts.tolist(), strict=True):
        text = np.array(texts[slot], dtype=np.int32)
        start = last_occurrence(text, ngram_min, ngram_max) if len(text) else 0
        expected = text[start : start + count].tolist()
        num_found += len(expected)
        assert found == expected + [NO_DRAFT] * (7 - len(expected)), (texts[slot][:20], len(text))
    assert num_found > 20


def test_rows_of_one_token_are_where_their_slots_are(device: torch.device) -> None:
    """Or, where no slot says, where the plan does; padding stays padding."""
    state = make_state(device)
    state[1, LENGTH], state[3, LENGTH] = 40, 7
    slots, planned = [1, 2, 3, NUM_SLOTS, 1], [44, 12, 7, -1, -1]
    ids, places = locate_rows(state, int32(slots, device), int32(planned, device))
    assert places.tolist() == [*slots, 40, 12, 7, -1, -1]
    assert ids[:3].tolist() == state[[1, 2, 3], LAST_TOKEN].tolist()


def planned_rows(device: torch.device, num_tokens: int, most: int) -> PlannedRows:
    """Rows of slots 4, 0 and 2, of 4, 1 and 3 tokens, and a padding row."""
    of_token = [0] * 4 + [1] + [2] * 3
    return PlannedRows(
        int32([4, 0, 2, NUM_SLOTS], device), int32([30, 11, 25, -1], device), int32([5, 0, 1, 0], device),
        int32([0, 4, 5, 0], device), int32([4, 1, 3, 0], device),
        int32(of_token + [-1] * (num_tokens - len(of_token)), device), most,
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [8, 11, 70])
def test_rows_feed_their_last_token_and_what_drafts_there_are(device: torch.device, num_tokens: int) -> None:
    state = make_state(device)
    state[4, LENGTH], state[2, LENGTH] = 28, 25
    drafts = torch.tensor([[31, -1, 33, -1], [35, 36, 37, 38], [41, 42, 43, 44], [9, 9, 9, 9]], device=device)
    shares = torch.full((9, 4), 99, dtype=torch.int32, device=device)
    fed = feed_rows(state, planned_rows(device, num_tokens, 5), drafts, shares, 3)
    last = state[:, LAST_TOKEN].tolist()
    padding = num_tokens - 8
    # A draft behind one that is none is none either; none is beyond what the plan has room for.
    assert fed.positions.tolist() == [28, 29, -1, -1, 11, 25, 26, 27] + [-1] * padding
    assert [fed.ids[i].item() for i in (0, 1, 4, 5, 6, 7)] == [last[4], 31, last[0], last[2], 41, 42]
    assert set(fed.ids[[2, 3, *range(8, num_tokens)]].tolist()) == {0}
    assert fed.slots.tolist() == [4, 4, 4, 4, 0, 2, 2, 2] + [NUM_SLOTS] * padding
    assert fed.choices.tolist() == [5, 5, 5, 5, 0, 1, 1, 1] + [0] * padding
    assert fed.firsts.tolist() == [28, 11, 25, -1]
    assert set(shares[[0, 1, 2, 7, 8]].flatten().tolist()) == {99}
    assert (
        fed.rows.tolist()
        == shares[3:7].tolist()
        == [[4, 0, 2, 28], [0, 4, 1, 11], [2, 5, 3, 25], [NUM_SLOTS, 0, 0, -1]]
    )


def test_drafts_count_as_far_as_they_are_what_was_chosen(device: torch.device) -> None:
    """Against the definition for guesses that the host knows: all ways that up to four drafts can be right or wrong."""
    cases = [[(number >> i) & 1 for i in range(length)] for length in range(5) for number in range(1 << length)]
    state = torch.zeros(len(cases) + 1, BLOCK_TABLE + 3, dtype=torch.int64, device=device)
    history = torch.zeros(len(cases) + 1, WIDTH, dtype=torch.int32, device=device)
    state[:-1, LENGTH], state[:-1, HISTORY] = 20, 23
    state[2, LENGTH], state[3, HISTORY] = -1, 0  # nobody said where it is; no history is kept
    chosen, ids, rows, places = [], [], [], []
    for slot, case in enumerate(cases):
        own = [100 + 10 * slot + i for i in range(len(case) + 1)]
        guesses = [own[i] if is_right else 5000 for i, is_right in enumerate(case)]
        rows.append([slot, len(ids), 1 + len(case), 20])
        ids += [77, *guesses]
        chosen += own
        places += [SamplePlace(slot, 0, 21 + i, slot, guess) for i, guess in enumerate([*guesses, None])]
    rows.append([len(cases), 0, 0, -1])
    fed_rows = torch.tensor(rows, dtype=torch.int32, device=device)
    nothing = int32([], device)
    fed = FedRows(torch.tensor(ids, device=device), nothing, nothing, nothing, nothing, fed_rows, 5)
    accepted = accept_drafts(torch.tensor(chosen, device=device), fed, state, history)
    is_counted = counting(places, chosen)
    for slot, case in enumerate(cases):
        first = rows[slot][1]
        expected = [chosen[i] for i in range(first, first + 1 + len(case)) if is_counted[i]]
        assert accepted.counts[slot].tolist() == [len(expected), len(case)]
        assert accepted.tokens[slot, : len(expected)].tolist() == expected
        assert state[slot, LAST_TOKEN] == expected[-1]
        if slot == 3:
            assert not history[slot].any()
            assert state[slot, [LENGTH, HISTORY]].tolist() == [20, 0]
            continue
        assert history[slot, 23 : 23 + len(expected)].tolist() == expected
        assert int(history[slot].count_nonzero()) == len(expected), "nothing that does not count is remembered"
        length = -1 if slot == 2 else 20 + len(expected)
        assert state[slot, [LENGTH, HISTORY]].tolist() == [length, 23 + len(expected)]
    assert accepted.counts[-1].tolist() == [0, 0]
    assert not state[-1].any()


def test_no_token_is_remembered_as_some_token(device: torch.device) -> None:
    """Its row ends; but the next step may be on its way, and must feed something."""
    state, history = make_state(device), torch.zeros(NUM_SLOTS + 1, WIDTH, dtype=torch.int32, device=device)
    state[1, HISTORY] = 4
    nothing = int32([], device)
    rows = torch.tensor([[1, 0, 3, 9]], dtype=torch.int32, device=device)
    fed = FedRows(torch.tensor([3, 50, 51], device=device), nothing, nothing, nothing, nothing, rows, 5)
    accepted = accept_drafts(torch.tensor([50, -1, 51], device=device), fed, state, history)
    assert accepted.counts.tolist() == [[2, 2]]
    assert state[1, LAST_TOKEN] == 0
    assert history[1, 4:7].tolist() == [50, 0, 0]


def test_tokens_of_rows_without_drafts_follow_in_their_histories(device: torch.device) -> None:
    state, history = make_state(device), torch.zeros(NUM_SLOTS + 1, WIDTH, dtype=torch.int32, device=device)
    state[2, HISTORY], state[2, LENGTH], state[5, HISTORY] = 6, 14, WIDTH
    before = state.clone()
    tokens = torch.tensor([81, 82, 83, 84], device=device)
    follow_tokens(tokens, int32([2, 0, NUM_SLOTS, 5], device), int32([14, 3, -1, 8], device), state, history)
    assert history[2, 6] == 81
    assert int(history.count_nonzero()) == 1, "slots without a history, padding, and a full one are left alone"
    assert state[2, [LENGTH, HISTORY]].tolist() == [15, 7]
    assert torch.equal(state[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])
