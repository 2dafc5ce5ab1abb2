"""From times of both lanes to the rates of shares, and which times nobody should believe."""

from __future__ import annotations

import math

import pytest

from scheduler.lane_measurement import AbsurdTimes, LaneTimes, measured_by
from scheduler.lane_split import LaneShare

ALONE = LaneTimes(prompts_s=0.047, rows_s=0.0052)
SHARES = (LaneShare(100, 0.6, 0.55), LaneShare(92, 0.58, 0.48), LaneShare(68, 0.45, 0.55))


def times(*pairs: tuple[float, float]) -> dict[object, LaneTimes]:
    return {share: LaneTimes(*pair) for share, pair in zip(SHARES, pairs, strict=True)}


SEEN = ((0.076, 0.0137), (0.082, 0.0109), (0.105, 0.0095))


def test_rates_are_parts_of_what_each_lane_has_alone() -> None:
    shares = measured_by(ALONE, times(*SEEN))  # type: ignore[arg-type]
    assert [share.num_processors for share in shares] == [100, 92, 68]
    assert [round(share.prefill_rate, 2) for share in shares] == [0.62, 0.57, 0.45]
    assert [round(share.decode_rate, 2) for share in shares] == [0.38, 0.48, 0.55]


def test_no_rate_is_above_that_of_the_whole_card() -> None:
    shares = measured_by(ALONE, times((0.0465, 0.0104), (0.082, 0.0109), (0.105, 0.0051)))  # type: ignore[arg-type]
    assert shares[0].prefill_rate == 1.0
    assert shares[2].decode_rate == 1.0


ABSURD = {
    # what was measured -> what is said
    "no time": (((0.0, 0.0137), *SEEN[1:]), "took no time"),
    "no end": (((math.inf, 0.0137), *SEEN[1:]), "took no time, or no end"),
    "not a number": (((math.nan, 0.0137), *SEEN[1:]), "took no time"),
    "rows did not run beside them": (((0.076, 0.5), *SEEN[1:]), "rows have 0.01 of their rate with 100"),
    "prompts were disturbed": ((SEEN[0], (3.0, 0.0109), SEEN[2]), "prompts have 0.02 of their rate with 92"),
    "faster than alone": (((0.030, 0.0137), *SEEN[1:]), "prompts have 1.57 of their rate"),
    "nothing was divided": (((0.049, 0.0054), (0.049, 0.0054), (0.049, 0.0054)), "both lanes do 1.92"),
    "one after the other": (((0.16, 0.04), *SEEN[1:]), "both lanes do 0.42"),
    "more of the card and slower": (
        ((0.105, 0.0095), (0.082, 0.0109), (0.076, 0.0137)),
        "0.57 .* 92 .* 0.45 on 100",
    ),
}


@pytest.mark.parametrize(("seen", "said"), ABSURD.values(), ids=ABSURD.keys())
def test_what_cannot_be_true_is_refused_by_name(seen: tuple[tuple[float, float], ...], said: str) -> None:
    with pytest.raises(AbsurdTimes, match=said):
        measured_by(ALONE, times(*seen))  # type: ignore[arg-type]


def test_nothing_to_divide() -> None:
    assert measured_by(ALONE, {}) == ()
