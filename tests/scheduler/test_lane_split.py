"""How a card is divided, by what waits and what runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.lane_split import (
    ALONE,
    WHOLE_CARD,
    LaneLoad,
    LaneObjectives,
    LaneRates,
    LaneShare,
    choose_share,
    estimated_shares,
)

# Llama-3.1-8B on an H200: 2,048 tokens in 47 ms, 16 rows in 5.2 ms.
RATES = LaneRates(prefill_tokens_per_s=43_600.0, decode_step_s=0.0052)
OBJECTIVES = LaneObjectives(ttft_s=0.4, token_gap_s=0.011)
H200 = estimated_shares(132)  # 92 and 68 for prompts

CASES = {
    # tokens of prompts, their oldest wait, rows, seconds of a decode step -> multiprocessors of the prefill lane
    "nothing runs": ((2048, 0.0, 0, 0.0), None),
    "nothing runs, and prompts wait": ((40_960, 1.0, 0, 0.0), None),
    "one prompt, few rows": ((2048, 0.0, 1, 0.005), 92),
    "one prompt": ((2048, 0.0, 12, 0.0055), 92),
    "a queue that this keeps up with": ((8192, 0.02, 12, 0.0055), 92),
    "rows that the smaller share keeps": ((2048, 0.0, 16, 0.0060), 68),
    "and a queue that it keeps too": ((6144, 0.05, 16, 0.0060), 68),
    "rows that only the smaller share keeps, and a queue that it does not": ((14_336, 0.1, 16, 0.0060), 92),
    "one that waited too long": ((2048, 0.5, 16, 0.0052), 92),
    "a queue that nothing keeps up with": ((40_960, 1.0, 16, 0.0060), 92),
    "slow steps": ((2048, 0.0, 128, 0.0079), 68),
    "slow steps and a queue": ((20_480, 0.1, 128, 0.0079), 92),
    "steps too slow on any share": ((2048, 0.0, 256, 0.02), 68),
}


@pytest.mark.parametrize(("load", "expected"), CASES.values(), ids=CASES.keys())
def test_share(load: tuple[int, float, int, float], expected: int | None) -> None:
    tokens, wait_s, rows, step_s = load
    asked = LaneLoad(tokens, wait_s, rows, replace(RATES, decode_step_s=step_s))
    assert choose_share(asked, OBJECTIVES, H200).num_processors == expected


def test_the_longer_the_queue_the_more_prompts_get_and_more_rows_take_it_back() -> None:
    def share(tokens: int, step_s: float) -> LaneShare:
        load = LaneLoad(tokens, 0.0, 16, replace(RATES, decode_step_s=step_s))
        return choose_share(load, OBJECTIVES, H200)

    by_queue = [share(2048 * count, 0.0062).prefill_rate for count in range(1, 40)]
    assert by_queue == sorted(by_queue)
    assert len(set(by_queue)) > 1
    by_rows = [share(20_480, 0.004 + 0.0005 * count).decode_rate for count in range(80)]
    assert by_rows == sorted(by_rows)
    assert len(set(by_rows)) > 1


def test_nothing_measured_yet() -> None:
    load = LaneLoad(2048, 0.0, 3)
    assert choose_share(load, OBJECTIVES, H200).num_processors == 92  # the most for prompts
    assert choose_share(load, OBJECTIVES, ()) is ALONE
    assert choose_share(replace(load, num_rows=0), OBJECTIVES, H200) is WHOLE_CARD


def test_what_rates_are_measured_within_noise_decides_nothing() -> None:
    """Three in a hundred more or less of what both lanes do in all: another share would be chosen by the most work."""
    load = LaneLoad(4096, 0.03, 12, replace(RATES, decode_step_s=0.0052))
    for factor in (0.97, 1.0, 1.03):
        shares = tuple(replace(share, decode_rate=share.decode_rate * factor) for share in H200)
        for less, more in ((shares[0], H200[1]), (H200[0], shares[1])):
            assert choose_share(load, OBJECTIVES, (less, more)).num_processors == 92
            assert choose_share(load, OBJECTIVES, (more, less)).num_processors == 92


@pytest.mark.parametrize(
    ("num_processors", "expected"), [(132, [92, 68]), (108, [76, 52]), (58, [42, 26]), (20, [12]), (8, [])]
)
def test_any_card(num_processors: int, expected: list[int]) -> None:
    assert [share.num_processors for share in estimated_shares(num_processors)] == expected
