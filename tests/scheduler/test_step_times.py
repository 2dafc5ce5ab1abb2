"""What steps are taken to last: what was measured, what lies between, beyond, and what was no usual step."""

from __future__ import annotations

import random

import pytest

from scheduler.step_times import StepTimes


def timed(points: dict[tuple[int, int], float], repeats: int = 8, context: int = 1000) -> StepTimes:
    """points: seconds by drafts and tokens."""
    step_times = StepTimes()
    for _ in range(repeats):
        for (drafts, tokens), seconds in points.items():
            step_times.count(drafts, tokens, context, seconds)
    return step_times


def test_nothing_is_known_without_steps_without_drafts() -> None:
    assert StepTimes().seconds(0, 1, 100) is None
    assert timed({(7, 8): 0.005}).seconds(7, 8, 1000) is None


def test_between_and_beyond() -> None:
    step_times = timed({(0, 1): 0.004, (0, 9): 0.008, (0, 100): 0.010, (4, 5): 0.007, (4, 45): 0.009})
    assert step_times.seconds(0, 1, 1000) == pytest.approx(0.004)
    assert step_times.seconds(0, 5, 1000) == pytest.approx(0.006)
    assert step_times.seconds(4, 25, 1000) == pytest.approx(0.008)
    assert step_times.seconds(0, 200, 1000) == pytest.approx(0.0163, rel=0.02)  # as from the first to the last
    assert timed({(0, 100): 0.010}).seconds(0, 200, 1000) == pytest.approx(0.010 * 2**0.2, rel=0.02)
    assert step_times.seconds(4, 3, 1000) < 0.007  # type: ignore[operator]
    between = step_times.seconds(7, 45, 1000)  # no such steps yet: as those without drafts
    assert between is not None
    assert 0.008 < between < 0.010


def test_time_that_goes_with_tokens_is_taken_to_go_on() -> None:
    step_times = timed({(0, 16): 0.080, (2, 48): 0.213})
    expected_s = 0.213 + 80 * (0.213 - 0.080) / 32
    assert step_times.seconds(0, 128, 1000) == pytest.approx(expected_s, rel=0.05)
    assert step_times.seconds(2, 128, 1000) == pytest.approx(expected_s, rel=0.05)
    untried_s = step_times.seconds(7, 128, 1000)  # rather too short, so that it is tried
    assert untried_s is not None
    assert 0.213 < untried_s < expected_s


def test_a_first_step_that_compiles_is_forgotten() -> None:
    step_times = timed({(0, 1): 0.004})
    step_times.count(7, 8, 1000, 3.0)
    before = step_times.seconds(7, 8, 1000)
    assert before is not None
    assert before < 0.01, "it would never be tried again"
    step_times.count(7, 8, 1000, 0.005)
    assert step_times.seconds(7, 8, 1000) == pytest.approx(0.005)


def test_a_step_that_seems_short_is_not_believed() -> None:
    """It was told in time, the one in front of it late: that one then seems long by as much."""
    step_times = StepTimes()
    for seconds in (0.0105, 0.0037, 0.0049, 0.0049):
        step_times.count(2, 3, 1000, seconds)
    step_times.count(0, 1, 1000, 0.0041)
    assert step_times.seconds(2, 3, 1000) == pytest.approx(0.0049)


def test_a_time_that_settles_says_nothing_of_contexts() -> None:
    """A size whose first times were short: while its mean rises, so do the contexts. Another size's time, measured with
    short ones, is what it was."""
    step_times = StepTimes()
    for step in range(5):
        step_times.count(0, 1, 250 + step, 0.0041)
        step_times.count(4, 5, 250 + step, 0.0054)
    for seconds in (0.0039, 0.0039, 0.0039, 0.0039, *[0.0049] * 200):
        step += 1
        step_times.count(2, 3, 250 + 2 * step, seconds)
    assert step_times.seconds(4, 5, 650) == pytest.approx(0.0054, rel=0.02)
    assert step_times.seconds(0, 1, 650) == pytest.approx(0.0041, rel=0.02)


def test_a_time_that_goes_with_tokens_is_none_of_contexts() -> None:
    """Of two numbers of tokens that count as one size, the larger one later on, with longer contexts."""
    step_times = timed({(0, 256): 0.0118}, repeats=30)
    for step in range(200):
        step_times.count(2, 258 if step < 100 else 286, 1000 + 256 * step, 0.0130 if step < 100 else 0.0150)
    assert step_times.seconds(0, 256, 52_000) == pytest.approx(0.0118, rel=0.03)


def test_an_interrupted_step_counts_for_little() -> None:
    step_times = timed({(0, 1): 0.004}, repeats=50)
    step_times.count(0, 1, 1000, 4.0)
    assert step_times.seconds(0, 1, 1000) == pytest.approx(0.004, rel=0.03)
    for _ in range(200):  # and one that lasts is believed
        step_times.count(0, 1, 1000, 0.008)
    assert step_times.seconds(0, 1, 1000) == pytest.approx(0.008, rel=0.01)


def test_context_is_told_from_tokens() -> None:
    """Drafts were timed with short contexts, and are asked for with long ones."""
    rng, step_times = random.Random(2), StepTimes()
    for _ in range(2000):
        context = rng.randint(1000, 50_000)
        step_times.count(0, 8, context, 0.004 + 1e-7 * context)
    for _ in range(20):
        step_times.count(4, 40, 1000, 0.006)
    assert step_times.seconds(0, 8, 40_000) == pytest.approx(0.008, rel=0.05)
    assert step_times.seconds(4, 40, 40_000) == pytest.approx(0.0099, rel=0.07)


def test_old_times_with_drafts_are_not_believed() -> None:
    step_times = timed({(0, 1): 0.004, (4, 5): 0.050})
    assert step_times.seconds(4, 5, 1000) == pytest.approx(0.050)
    for _ in range(1200):
        step_times.count(0, 1, 1000, 0.004)
    assert step_times.seconds(4, 5, 1000) < 0.050  # type: ignore[operator]
    assert step_times.age(1) == 0
    for _ in range(4):
        step_times.count(4, 5, 1000, 0.006)
    assert step_times.seconds(4, 5, 1000) == pytest.approx(0.006)
    assert step_times.age(1) == 4


def test_what_is_no_step_is_not_counted() -> None:
    step_times = StepTimes()
    step_times.count(0, 0, 0, 0.1)
    step_times.count(0, 1, 10, 0.0)
    assert step_times.seconds(0, 1, 10) is None
