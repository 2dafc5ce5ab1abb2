"""The comparison with the real system, with a simulated one in its place: known constants come back, ratios are 1."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import yaml

from benchmarks import simulation_check
from benchmarks.kept_loads import keep_records, kept_records
from cluster.load.request_record import RequestRecord
from cluster.simulation.client import Client
from cluster.simulation.cost_model import ControlCosts, CostModel, TransferCosts
from cluster.simulation.step_model import StepModel

CONFIG = yaml.safe_load(simulation_check._CONFIG.read_text())
GUESS = CostModel(
    source="made up",
    kv_bytes_per_token=1000,
    decode=StepModel(base_s=0.05, row_s=0.004),
    prefill=StepModel(base_s=0.02, prompt_token_s=0.003),
)
TRUTH = GUESS.model_copy(update={"control": ControlCosts(ingress_s=0.031), "transfer": TransferCosts(latency_s=0.017)})


def records(gap_s: float, count: int) -> list[RequestRecord]:
    return [
        RequestRecord(
            index,
            100.0,
            sent_s=100.0 + gap_s * index,
            num_input_tokens=32 + 7 * index % 90,
            num_wanted_tokens=4 + index,
        )
        for index in range(count)
    ]


def measured(gap_s: float, count: int) -> list[RequestRecord]:
    """As if TRUTH had been measured."""
    result = records(gap_s, count)
    for record, client in zip(result, simulation_check._simulate(TRUTH, result, CONFIG), strict=True):
        record.num_output_tokens = record.num_wanted_tokens
        record.token_times_s = array("d", times_of(client, record.num_wanted_tokens))
    return result


def times_of(client: Client, num_tokens: int) -> list[float]:
    step_s = (client.last_s - client.first_s) / (num_tokens - 1)
    return [100.0 + client.first_s + step_s * index for index in range(num_tokens)]


def test_constants_come_back_from_probes() -> None:
    costs = simulation_check._with_constants(GUESS, measured(gap_s=5.0, count=6), CONFIG)
    assert costs.control.ingress_s == pytest.approx(0.031)
    assert costs.transfer.latency_s == pytest.approx(0.017)


def test_the_same_system_has_ratios_of_one() -> None:
    real = measured(gap_s=0.4, count=40)
    rows = simulation_check._rows(real, simulation_check._simulate(TRUTH, real, CONFIG))
    assert [row["ratio"] for row in rows] == pytest.approx([1.0] * 4)
    slower = simulation_check._rows(real, simulation_check._simulate(GUESS, real, CONFIG))
    assert slower[0]["ratio"] < 0.95


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    real = measured(gap_s=0.4, count=5)
    keep_records(tmp_path / "compared.json", real)
    assert kept_records(tmp_path / "compared.json") == real
