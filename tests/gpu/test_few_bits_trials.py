"""What a campaign tries of few bits: each way's steps are timed, with the logits of the first, and nothing stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from benchmarks.gpu import few_bits_trials
from benchmarks.gpu.campaign_alone import ALONE
from benchmarks.gpu.few_bits_trials import PIECES, make_runner, steps_of_ways
from benchmarks.gpu.steps_runner import StepsRunner
from replicas.cuda import int4_card_linear, quantised_card_linear
from tests.gpu.test_cuda_runner import CONFIG, card  # noqa: F401 - a fixture

pytestmark = pytest.mark.interpreted


def test_each_trial_is_a_piece_and_begins_and_ends_as_shipped() -> None:
    assert set(PIECES) <= set(ALONE)
    for trial in PIECES.values():
        first, *_, last = trial.ways.values()
        assert first is last is few_bits_trials.as_shipped


@pytest.mark.parametrize("name", PIECES)
def test_every_way_gives_the_same_logits(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_bits_trials, "CONTEXT", 40)
    timed: list[int] = []

    def decode_ms(runner: Any, batch: int, *others: Any) -> float:
        timed.append(batch)
        return 1.5

    monkeypatch.setattr(few_bits_trials, "decode_ms", decode_ms)
    if not torch.cuda.is_available():  # where nothing is compiled
        monkeypatch.setattr(StepsRunner, "compile_layers", lambda runner: None)
    config = CONFIG | {"intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trial = PIECES[name]
    for quantise in trial.quantise:
        found: dict[str, Any] = {}
        runner = make_runner(tmp_path, "float16", device, quantise, 2)
        steps_of_ways(runner, trial.ways, (2,), found.update)
        assert found == {f"{way}, 2 rows": [1.5, 0.0] for way in trial.ways}
        logits = runner.logits(few_bits_trials.set_up(2, 40, 16))
        assert logits.shape == (2, config["vocab_size"])
        assert logits.std() > 0
    assert timed == [2] * len(trial.ways) * len(trial.quantise)


def test_each_trials_tiles_are_others_than_those_that_ship() -> None:
    """At sizes of Llama-3.1-8B; of a small model they are the same."""
    parts, wide = PIECES["int4-parts"].ways["parts as before"], PIECES["fp8-wide"].ways["512 inputs"]
    sizes = [(28672, 4096), (4096, 14336), (4096, 4096)]
    shipped = [int4_card_linear.int4_tile(64, *size).num_parts for size in sizes]
    with parts():
        assert [int4_card_linear.int4_tile(64, *size).num_parts for size in sizes] == [1, 8, 4]
        assert int4_card_linear.int4_tile(16, *sizes[1]).num_parts == 8
    assert shipped == [int4_card_linear.int4_tile(64, *size).num_parts for size in sizes] == [2, 4, 4]
    with PIECES["first-weights"].ways["held, a stage less"]():
        assert int4_card_linear.int4_tile(1, *sizes[1]) == (128, 128, 4, 2, 8, True)
        assert quantised_card_linear.scaled_tile(1, *sizes[1], 200_000) == (64, 256, 4, 3, 4, True)
    with wide():
        tiles = [quantised_card_linear.scaled_tile(1, *size, 200_000)[1:] for size in sizes]
    assert tiles == [(256, 4, 4, 1, False), (512, 4, 3, 2, False), (512, 4, 3, 2, False)]
