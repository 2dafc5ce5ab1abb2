"""The benchmark of schemas and grammars: what it judges, what it sends twice, what it makes of times."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.grammars.hostile import _of_bystanders, _of_memory, _of_times
from benchmarks.grammars.short_model import save_short_model
from benchmarks.grammars.verdict import Figure, as_table, percentile_interval, share_figure
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


def test_memory_is_flat_if_the_last_list_adds_little_whatever_the_first_ones_added() -> None:
    after_hostile = [
        Counter({"ingress": 300.0, "decode": 700.0}),
        Counter({"ingress": 320.0, "decode": 900.0}),
        Counter({"ingress": 520.0, "decode": 910.0}),
    ]
    after_harmless = [Counter({"ingress": 321.0, "decode": mb}) for mb in (700.0, 903.0, 915.0)]
    grown = {figure.name: figure for figure in _of_memory(after_hostile, after_harmless)}
    assert {name: figure.verdict for name, figure in grown.items()} == {
        "memory of ingress": "missed",
        "memory of decode": "reached",
    }
    assert "+200 +10, of the last +3 by harmless ones; 910 MB now" in grown["memory of decode"].compared


def test_the_longest_of_them_is_named() -> None:
    longest = _of_times({"a": 0.1, "b": 1.4}, Counter({200: 1, 400: 1}))[1]
    assert longest.is_missed
    assert "longest: b" in longest.compared


def test_what_noise_hides_is_neither_reached_nor_missed() -> None:
    rng = random.Random(3)
    noise = [rng.gauss(0, 5) for _ in range(400)]
    for added, most, verdict in ((0.2, 0.3, "not told"), (0.2, 4.0, "reached"), (5.0, 0.3, "missed")):
        values = [added + rng.gauss(0, 5) for _ in range(400)]
        figure = share_figure("added", values, 50, "ms", most, noise)
        assert figure.verdict == verdict
        assert figure.is_missed == (verdict == "missed")
        assert (verdict == "not told") == ("not told" in as_table([figure]))


def test_what_noise_alone_misses_is_not_told() -> None:
    values = [float(value) for value in range(1000)]
    assert share_figure("added", values, 99, "ms", 20.0, values).verdict == "not told"
    assert share_figure("added", values, 99, "ms", 20.0, [0.0] * 1000).verdict == "missed"


def test_an_interval_has_the_true_percentile_95_of_100_times() -> None:
    rng = random.Random(5)
    for share, true_value in ((50, math.log(2)), (99, math.log(100))):
        intervals = [percentile_interval([rng.expovariate(1) for _ in range(500)], share) for _ in range(400)]
        assert sum(low <= true_value <= high for low, high in intervals) >= 0.93 * len(intervals)
    assert percentile_interval([1.0, 2.0, 3.0], 99)[1] == math.inf, "of three values nobody knows the last hundredth"
    assert share_figure("added", [1.0] * 100, 99, "ms", 20.0).verdict == "not told"


def test_the_short_model_is_the_bundled_one_with_fewer_layers(tmp_path: Path) -> None:
    save_short_model(tmp_path / "short", num_layers=1)
    config = AutoConfig.from_pretrained(tmp_path / "short")
    assert (config.num_hidden_layers, config.vocab_size) == (1, 49_152)
    names = load_file(tmp_path / "short" / "model.safetensors").keys()
    assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {"0"}
    assert "model.embed_tokens.weight" in names
    assert (tmp_path / "short" / "tokenizer.json").exists()
