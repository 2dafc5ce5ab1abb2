"""StopMatcher against a definition that any reader can check."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cluster.text.stop_strings import StopMatch, StopMatcher


def run(pieces: Sequence[str], stops: Sequence[str], include_stop: bool = False) -> tuple[str, str | None, int | None]:
    """All text emitted, what matched, and which push completed the match."""
    matcher = StopMatcher(stops, include_stop)
    emitted, matched, at = "", None, None
    for index, piece in enumerate(pieces):
        result = matcher.push(piece)
        emitted += result.text_to_emit
        if result.matched is not None and at is None:
            matched, at = result.matched, index
    return emitted + matcher.finish(), matched, at


def brute_force(text: str, stops: Sequence[str], include_stop: bool) -> tuple[str, str | None, int | None]:
    """Grows the text by one character: the first that completes a stop ends it; the longest of those it completes."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end if include_stop else end - len(stop)], stop, end
    return text, None, None


def random_pieces(rng: random.Random, text: str) -> list[str]:
    pieces = []
    while text:
        size = rng.choice([0, 1, 1, 2, 3, 8])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_however_the_text_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    num_matches = 0
    for _ in range(1000):
        alphabet = rng.choice(["ab", "abc", "a", "aé🔥"])
        text = "".join(rng.choices(alphabet, k=rng.randrange(25)))
        stops = ["".join(rng.choices(alphabet, k=rng.randrange(1, 7))) for _ in range(rng.randrange(5))]
        include_stop = rng.random() < 0.3
        pieces = random_pieces(rng, text)
        expected_text, expected_stop, end = brute_force(text, stops, include_stop)
        emitted, matched, at = run(pieces, stops, include_stop)
        assert (emitted, matched) == (expected_text, expected_stop), (pieces, stops)
        if end is not None:
            num_matches += 1
            assert at is not None
            assert len("".join(pieces[:at])) < end <= len("".join(pieces[: at + 1]))
    assert 200 < num_matches < 900


@pytest.mark.parametrize("seed", range(4))
def test_holds_back_exactly_what_could_become_a_stop(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=rng.randrange(20)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        matcher, emitted, seen = StopMatcher(stops), "", ""
        for piece in random_pieces(rng, text):
            result = matcher.push(piece)
            emitted, seen = emitted + result.text_to_emit, seen + piece
            if result.matched:
                break
            held = max(len(s[:k]) for s in stops for k in range(len(s)) if seen.endswith(s[:k]))
            assert emitted == seen[: len(seen) - held], (seen, stops)


def test_b04_nothing_of_a_stop_string_is_emitted() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    results = [matcher.push(piece) for piece in ["A", "BC", "DE", "FG", "HI", "JK"]]
    assert [r.text_to_emit for r in results] == ["A", "BC", "", "", "", ""]
    assert results[-1].matched == "DEFGHIJ"
    assert matcher.finish() == ""


def test_b05_stop_within_a_piece() -> None:
    assert run(["Hello"], ["e"]) == ("H", "e", 0)
    assert run(["Thought\n", "Obser", "vation: x"], ["\nObservation"]) == ("Thought", "\nObservation", 2)


def test_b07_include_stop() -> None:
    assert run(["ab", "cd"], ["bc"], include_stop=True) == ("abc", "bc", 1)
    assert run(["ab", "cd"], ["bc"], include_stop=False) == ("a", "bc", 1)


def test_b08_stop_at_the_very_start() -> None:
    assert run(["x"], ["x"]) == ("", "x", 0)


def test_the_first_to_be_complete_wins_then_the_longest() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc", 0)
    assert run(["abcd"], ["bc", "abc", "c"]) == ("", "abc", 0)
    assert run(["abc"], ["abc", "ab"]) == ("", "ab", 0)


def test_a_false_start_is_given_back() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == StopMatch("", None)
    assert matcher.push("a") == StopMatch("a", None)
    assert matcher.push("c") == StopMatch("aac", None)
    assert matcher.push("aa") == StopMatch("", None)
    assert matcher.finish() == "aa"


def test_after_a_match_text_is_ignored() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("ax").matched == "x"
    assert matcher.push("more") == StopMatch("", "x")
    assert matcher.finish() == ""


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == StopMatch("abc", None)
    assert matcher.finish() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_long_repetitive_stops_cost_no_more_than_short_ones() -> None:
    # Comparing tails naively would be 4 * 4,000 * 100,000 steps of work.
    stops = ["a" * size + "b" for size in (3997, 3998, 3999, 4000)]
    emitted, matched, _ = run(["aaaa"] * 25_000 + ["b"], stops)
    assert matched == stops[-1]
    assert len(emitted) == 100_000 - 4000
