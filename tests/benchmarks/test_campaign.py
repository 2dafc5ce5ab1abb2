"""A campaign's state: what was measured is not measured again, what went wrong is; the table says what is reached."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.campaign import KEPT, NAMES, asked_of
from benchmarks.gpu.campaign_alone import ALONE, shape_of
from benchmarks.gpu.campaign_pieces import SERVED, WORKLOADS
from benchmarks.gpu.campaign_record import CampaignRecord, InUse, held_alone
from benchmarks.gpu.campaign_servers import METRICS, Place, ServedPiece, todo_of
from benchmarks.gpu.campaign_table import as_text
from benchmarks.gpu.speculative_pieces import PIECES as SPECULATIVE
from benchmarks.real_server import free_port
from cluster.monitoring.metric_table import metric_table

LOADS = {workload.name: workload for workload in WORKLOADS}
KEPT_FIGURES: dict[str, Any] = json.loads(KEPT.read_text())


def run(piece: str, rate: float, ttft_ms: float = 100.0, tpot_ms: float = 9.0, **others: Any) -> dict[str, Any]:
    line = {"piece": piece, "workload": "2048/128", "rate": rate, "completed": 300, "failed": 0, "p50_tpot_ms": 8.3}
    line |= {"p90_ttft_ms": ttft_ms, "p90_tpot_ms": tpot_ms, "p99_itl_ms": 14.0, "p90_second_token_ms": 20.0}
    return line | others


def place(folder: Path, known: tuple[dict[str, Any], ...] = ()) -> Place:
    return Place(folder, folder, folder, LOADS, None, 1, 3, known, {}, lambda seconds: True)


def test_lines_are_kept_and_read_again(tmp_path: Path) -> None:
    state, out = tmp_path / "state.jsonl", tmp_path / "out" / "state.jsonl"
    first = CampaignRecord([state, out], [])
    first.add(run("lanes", 8.0))
    first.add({"piece": "handoff", "workload": None, "error": "no card"})
    assert state.read_text() == out.read_text()
    later = CampaignRecord([tmp_path / "new.jsonl"], [out, state])
    assert later.lines == first.lines
    assert later.of("lanes", "2048/128", 8.0) == run("lanes", 8.0)
    assert later.of("lanes", "2048/128", 12.0) is None
    assert later.of("handoff") is None, "it went wrong: it is to be measured again"
    later.add({"piece": "handoff", "workload": None, "ms": 1.0})
    assert later.of("handoff") is not None


def test_two_campaigns_do_not_write_to_the_same_place(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    for path in (state, tmp_path):
        with held_alone(path):
            with pytest.raises(InUse, match="another campaign"), held_alone(path):
                pass
            with held_alone(tmp_path / "other.jsonl"):
                pass
        with held_alone(path):
            pass  # free again


def test_servers_of_two_benchmarks_get_ports_that_nobody_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for process in (4711, 4712):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        ports.append(free_port())
    assert ports[0] != ports[1]
    assert all(20_000 <= port < 30_000 for port in ports), "not where the kernel, Ray and Serve give ports away"


def test_the_last_run_of_a_rate_counts(tmp_path: Path) -> None:
    record = CampaignRecord([], [])
    record.lines = [run("lanes", 8.0, tpot_ms=20.0), run("lanes", 8.0), run("lanes", 12.0, failed=1)]
    points = record.points("lanes", "2048/128", LOADS["2048/128"].limits)
    assert [(point.rate, round(point.ratio, 2)) for point in points] == [(8.0, 0.9), (12.0, float("inf"))]


def test_fixed_runs_come_first_then_searches_that_take_them_into_account(tmp_path: Path) -> None:
    (lanes,) = [piece for piece in SERVED if piece.name == "lanes"]
    record = CampaignRecord([], [])
    assert next(iter(todo_of(lanes, place(tmp_path), record))) == ("2048/128", 8.0)
    record.lines = [run("lanes", 8.0)]
    assert next(iter(todo_of(lanes, place(tmp_path), record))) == ("2048/128", 12.0)
    record.lines.append(run("lanes", 12.0, tpot_ms=13.0))
    (name, rate), *_ = todo_of(lanes, place(tmp_path), record)
    assert name == "2048/128"
    assert 8.0 < rate < 12.0
    record.lines.append(run("lanes", rate))
    assert [name for name, _ in todo_of(lanes, place(tmp_path), record)] == ["512/512"], "three runs at most"


def test_a_search_of_vllm_s_rate_begins_with_what_is_kept(tmp_path: Path) -> None:
    piece = ServedPiece("vllm", None, 1.0, (), ("2048/128", "512/512"))
    todo = dict(todo_of(piece, place(tmp_path, tuple(KEPT_FIGURES["runs"])), CampaignRecord([], [])))
    assert 6.0 < todo.get("2048/128", 6.5) < 7.0
    assert todo["512/512"] > 8.0


def test_the_table_says_what_is_reached_and_what_went_wrong() -> None:
    record = CampaignRecord([], [])
    record.lines = [
        run("lanes", 8.0, ttft_ms=330.0),
        run("lanes", 10.0, tpot_ms=11.0),
        run("colocated", 4.0, tpot_ms=7.0),
        run("split-slow", 4.0, tpot_ms=9.2),
        run("vllm", 8.0, tpot_ms=10.7, p50_tpot_ms=8.5),
        {"piece": "handoff", "workload": None, "256_mib_first_median_best_ms": [3.0, 1.1, 0.9]},
        {"piece": "steps-two", "workload": None, "step_1_ms": 4.2, "step_64_ms": 8.0},
        {"piece": "split", "workload": None, "error": "ServerFailed: not ready"},
    ]
    text = as_text(record, LOADS, KEPT_FIGURES)
    assert "missed by 10.0 %" in text  # TTFT of the lanes
    assert "missed by 1.1 %" in text  # 9.2 ms beside 1.3 x 7
    assert text.count("reached") >= 7
    assert "6 (6.79)" in text, "vLLM's goodput, by what is kept"
    assert "1.027 of the kept; as then" in text
    assert "WENT WRONG: split: ServerFailed: not ready" in text


def test_two_cards_are_searched_at_twice_the_rate_and_not_by_what_one_gave(tmp_path: Path) -> None:
    known = place(tmp_path, tuple(KEPT_FIGURES["runs"]))
    (vllm,) = [piece for piece in SERVED if piece.name == "pair-vllm"]
    assert dict(todo_of(vllm, known, CampaignRecord([], [])))["2048/128"] == 18.0
    record = CampaignRecord([], [])
    record.lines = [run("pair-vllm", 12.0), run("pair-vllm", 14.0, tpot_ms=11.0), run("pair-split", 16.0)]
    record.lines.append(run("four-3p1d", 36.0))
    text = as_text(record, LOADS, {"runs": []})
    assert "pair-vllm" in text
    assert "12 (13" in text, "between the two"
    assert "16 (more)" in text
    assert "36 (more)" in text.split("four cards")[1]


def test_each_layout_of_four_cards_takes_all_of_them() -> None:
    pieces = {piece.name: piece for piece in SERVED if piece.num_cards == 4}
    assert set(pieces) == {"four-3p1d", "four-2p2d", "four-lanes", "four-colocated"}
    for piece in pieces.values():
        assert sum(number for key, number in piece.changes.items() if key.endswith(".replicas")) == 4


def test_what_is_left_to_run_is_known_by_its_names() -> None:
    text = KEPT.with_name("CAMPAIGN.md").read_text()
    named = {name for names in re.findall(r"--only ([a-z0-9,-]+)", text) for name in names.split(",")}
    assert len(named) > 20
    assert named <= set(NAMES)


def test_every_piece_of_drafts_has_its_time() -> None:
    assert set(SPECULATIVE) <= set(ALONE)


def test_what_is_kept_of_a_servers_metrics_are_metrics() -> None:
    """One that has another name by now would be kept of no server, and nobody would notice."""
    series = {row.name + ("_total" if row.type == "counter" else "") for row in metric_table()}
    assert set(METRICS) - series == set()


def test_only_the_workloads_that_are_asked_for_are_run() -> None:
    options = argparse.Namespace(small=False, workloads=["8192/256"])
    pieces = {piece.name: piece for piece in asked_of(options)}
    assert set(pieces) == {piece.name for piece in SERVED}
    assert (pieces["pair-split"].runs, pieces["pair-split"].searches) == ((), ("8192/256",))
    assert (pieces["lanes"].runs, pieces["lanes"].searches) == ((), ())
    options.workloads = list(LOADS)
    assert list(asked_of(options)) == list(SERVED)


def test_shapes_that_are_measured_are_here() -> None:
    options = argparse.Namespace(shapes=KEPT.with_name("shapes"))
    assert json.loads(shape_of(options).read_text())["hidden_size"] == 4096
