"""The benchmark of schemas and grammars: what it judges, what it sends twice, what it makes of times."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from benchmarks.grammars.hostile import _of_bystanders, _of_memory, _of_times
from benchmarks.grammars.verdict import Figure, as_table
from tests.cluster.hostile_grammars import body_of, hostile_sources, made_new


@pytest.mark.parametrize(
    ("value", "most", "is_missed"), [(1.0, 1.0, False), (1.01, 1.0, True), (math.nan, 1.0, True), (9.0, None, False)]
)
def test_what_was_not_measured_is_missed(value: float, most: float | None, is_missed: bool) -> None:
    figure = Figure("x", value, "ms", most)
    assert figure.is_missed == is_missed
    assert ("missed" in as_table([figure])) == is_missed


def test_the_second_list_is_new_where_it_can_be() -> None:
    sources = [source for _, source in hostile_sources()]
    assert len(sources) > 300
    again = [made_new(source, 1) for source in sources]
    num_new = sum(new != old for new, old in zip(again, sources, strict=True))
    assert num_new > 0.6 * len(sources)
    assert all(made_new(source, 0) == source for source in sources)
    assert all(len(body_of(source)) < 140_000 for source in again)


def test_ratios_are_those_of_the_same_share() -> None:
    quiet = {"health": [5.0] * 100, "stream": [5.0] * 100}
    harmless = {"health": [10.0] * 100, "stream": [20.0] * 100}
    hostile = {"health": [12.0] * 95 + [99.0] * 5, "stream": [30.0] * 100}
    figures = {figure.name: figure for figure in _of_bystanders(quiet, harmless, hostile)}
    assert figures["/health, p50"].value == pytest.approx(1.2)
    assert not figures["/health, p90"].is_missed
    assert figures["/health, p99"].value == pytest.approx(9.9)
    assert not figures["/health, p99"].is_missed, "a few times of some hundreds are told only"
    assert figures["gap of a stream, p50"].is_missed


def test_memory_is_flat_if_the_last_list_adds_little() -> None:
    grown = _of_memory([Counter({"ingress": 300.0, "decode": 900.0}), Counter({"ingress": 500.0, "decode": 910.0})])
    assert {figure.name: figure.is_missed for figure in grown} == {
        "memory of ingress": True,
        "memory of decode": False,
    }
    longest = _of_times({"a": 0.1, "b": 1.4}, Counter({200: 1, 400: 1}))[1]
    assert longest.is_missed
    assert "longest: b" in longest.compared
