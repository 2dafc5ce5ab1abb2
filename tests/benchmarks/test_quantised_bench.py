"""Pieces of a campaign about few bits: what they are told, what is kept of one that is cut short, what is reached."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import campaign_alone
from benchmarks.gpu.campaign_alone import Budget, measure_alone, run_child
from benchmarks.gpu.campaign_record import CUT, CampaignRecord
from benchmarks.gpu.quantised_pieces import PIECES, shape_of
from benchmarks.gpu.quantised_table import quantised_rows
from benchmarks.gpu.side_by_side import VLLM_ENVIRONMENT

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
TINY = LLAMA | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 31_000, "max_position_embeddings": 4096,
}  # fmt: skip


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"shapes": folder, "tokenizer": folder, "device": "cpu", "small": True, "vllm_site": None, **changes}
    )


def test_the_large_shape_has_70_billion_weights(tmp_path: Path) -> None:
    shape = tmp_path / "llama-3.1-8b.json"
    shape.write_text(json.dumps(LLAMA))
    found = json.loads(shape_of(PIECES["steps-70b"], shape, tmp_path, is_small=False).read_text())
    hidden, inner = found["hidden_size"], found["intermediate_size"]
    heads = found["num_attention_heads"] + found["num_key_value_heads"]
    layer = 2 * heads * found["head_dim"] * hidden + 3 * inner * hidden
    assert found["num_attention_heads"] * found["head_dim"] == hidden
    assert found["num_hidden_layers"] * layer + 2 * found["vocab_size"] * hidden == pytest.approx(70.55e9, rel=1e-3)
    assert json.loads(shape_of(PIECES["steps-70b"], shape, tmp_path, is_small=True).read_text()) == LLAMA


def test_vllm_is_told_by_the_config_and_finds_its_packages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = tmp_path / "llama-3.1-8b.json"
    shape.write_text(json.dumps(LLAMA))
    methods = {
        name: json.loads(shape_of(piece, shape, tmp_path, is_small=False).read_text())["quantization_config"]
        for name, piece in PIECES.items()
        if piece.said is not None
    }
    assert {name: said["quant_method"] for name, said in methods.items()} == {
        "vllm-fp8": "compressed-tensors",
        "vllm-fp8-kv": "compressed-tensors",
        "vllm-awq": "awq",
    }
    monkeypatch.setenv("PYTHONPATH", "/ours")
    environment = campaign_alone._environment("vllm-awq", options(tmp_path, vllm_site=Path("/vllm")))
    assert environment["PYTHONPATH"].split(":") == ["/vllm", str(Path(campaign_alone.__file__).parents[2])]
    assert environment.items() >= VLLM_ENVIRONMENT.items()
    record = CampaignRecord([], [])
    with pytest.raises(ValueError, match="--vllm-site"):
        measure_alone("vllm-awq", options(tmp_path), tmp_path, record, Budget(1e6))


def test_a_piece_that_hangs_ends_with_all_that_it_started_and_leaves_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    said = """echo '{"step_1_ms": 2.0}'; sleep 600 & echo "{\\"step_1_ms\\": 2.0, \\"pid\\": $!}"; sleep 600"""
    script.write_text(f"#!/bin/sh\n{said}\n")
    script.chmod(0o755)
    monkeypatch.setattr(campaign_alone.sys, "executable", str(script))
    for expected_s in (1.6, 6.0, 24.0):  # on a machine that stands still it may be cut before it has said all
        monkeypatch.setitem(campaign_alone.ALONE, "steps-fp8", expected_s)
        record = CampaignRecord([], [])
        with pytest.raises(RuntimeError, match="steps-fp8 took too long"):
            measure_alone("steps-fp8", options(tmp_path), tmp_path / "logs", record, Budget(1e6))
        if record.lines and "pid" in record.lines[0]:
            break
    (line,) = record.lines
    assert line["workload"] == CUT
    assert line["step_1_ms"] == 2.0
    assert record.of("steps-fp8") is None, "it is to be measured again"
    until_s = time.monotonic() + 120.0
    while _is_alive(line["pid"]):
        assert time.monotonic() < until_s, "a process of the piece is left"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went between opening and reading
        return False


def test_the_last_line_of_figures_counts_whatever_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho \'{"a": 1}\'\necho \'{"a": 1, "b": 2}\'\necho INFO: an engine ends\n')
    script.chmod(0o755)
    monkeypatch.setattr(campaign_alone.sys, "executable", str(script))
    done = run_child("handoff", options(tmp_path), tmp_path / "handoff.log", 60.0)
    assert (done.returncode, done.figures) == (0, {"a": 1, "b": 2})


def test_rows_say_what_is_reached_and_who_is_faster() -> None:
    record = CampaignRecord([], [])
    record.lines = [
        {"piece": "steps-fp8", "workload": None, "step_1_ms": 2.4, "step_16_ms": 3.3, "prefill_16x2048_tok_s": 50_000},
        {"piece": "vllm-fp8", "workload": CUT, "step_1_ms": 3.0, "step_16_ms": 3.0},
        {"piece": "vllm-fp8", "workload": None, "error": "took too long"},
        {"piece": "steps-70b", "workload": None, "step_1_ms": 18.5, "start_s": 80.0},
    ]
    rows = {row[0]: row[1:] for row in quantised_rows(record)}
    assert rows["steps-fp8 step_1_ms"] == ["2.4", "3", "1.25x", "2.5", "reached"]
    assert rows["steps-fp8 step_16_ms"] == ["3.3", "3", "0.91x", "3.2", "missed by 3.1 %, vLLM is faster"]
    assert rows["steps-fp8 prefill_16x2048_tok_s"] == ["50,000", "-", "-", "62,000", "missed by 24.0 %"]
    assert rows["steps-70b step_1_ms"][-1] == "reached"
    assert rows["steps-70b start_s"] == ["80", "-", "-", "-", ""]
    assert "steps-int4 step_1_ms" not in rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps-fp8-kv", "steps-int4", "quant-kernels"])
def test_a_piece_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    shape = tmp_path / "llama-3.1-8b.json"
    shape.write_text(json.dumps(TINY))
    command = [sys.executable, "-m", "benchmarks.gpu.quantised_pieces", name, "--shape", str(shape)]
    command += ["--device", "cpu", "--dtype", "float32", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    if name == "quant-kernels":
        assert figures == {"skipped": "needs a card"}
        return
    assert figures["step_1_ms"] > 0
    assert figures["step_4_ms"] > 0
    assert figures["prefill_2x200_tok_s"] > 0
    assert "failed_check" not in figures
