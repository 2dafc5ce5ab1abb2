"""`splitserve simulate` and how it takes a trace: what it prints and writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.load.traces import TraceEntry
from cluster.serving.command_line import main
from cluster.simulation.trace_jobs import TraceScale, trace_jobs

ROOT = Path(__file__).parents[2]
LOCAL = str(ROOT / "configs/local.yaml")
STEPS = str(ROOT / "benchmarks/step_times/llama-3.1-8b-h100.json")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:17:{second:02d}.5,{100 + second},{5 + second % 7}" for second in range(30)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return str(path)


def test_figures_on_paper_and_in_json(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    command = ["simulate", LOCAL, "--trace", trace, "--steps", STEPS, "--goodput", "ttft:500", "--json", str(path)]
    assert main(command) == 0
    output = capsys.readouterr().out
    for part in ("30 of 30 requests", "TTFT ms", "TPOT ms", "ITL ms", "goodput (ttft <= 500 ms)", "preemptions 0"):
        assert part in output
    summary = json.loads(path.read_text())
    assert summary["completed"] == 30
    assert summary["total_output_tokens"] == sum(5 + second % 7 for second in range(30))
    assert summary["goodput_fraction"] == 1.0
    assert len(summary["kv_use"]) > 100


def test_kv_in_fp8_is_half_of_what_the_steps_were_measured_with(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fp8.yaml"
    config.write_text(Path(LOCAL).read_text().replace("\n  dtype: auto\n", "\n  dtype: fp8\n"))
    assert main(["simulate", str(config), "--trace", trace, "--steps", STEPS]) == 0
    assert "KV cache in fp8: 65536 bytes a token; steps as with bfloat16" in capsys.readouterr().out
    assert main(["simulate", LOCAL, "--trace", trace, "--steps", STEPS]) == 0
    assert "KV cache in" not in capsys.readouterr().out


def test_tokens_guessed_ahead(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ngram.yaml"
    config.write_text(Path(LOCAL).read_text().replace("\n  method: none\n", "\n  method: ngram\n"))
    command = ["simulate", str(config), "--trace", trace, "--steps", STEPS, "--length-scale", "4"]
    assert main([*command, "--acceptance", "0.9", "0.9"]) == 0
    assert "guessed ahead: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--acceptance", "0.9", "1.5"])
    assert "no probability" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "saved_ms"), [("fp8", 1.98), ("int8", 1.98), ("int4", 2.84)])
def test_quantised_weights_are_read_sooner(
    kind: str, saved_ms: float, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7 thousand million weights of two bytes at 3.5 TB/s take 4 ms; half of that, or a quarter and its scales."""
    config = tmp_path / "quantised.yaml"
    config.write_text(Path(LOCAL).read_text().replace("\n  quantise: none\n", f"\n  quantise: {kind}\n"))
    of_h200 = str(ROOT / "benchmarks/step_times/llama-3.1-8b-h200.json")
    medians = {}
    for name in (str(config), LOCAL):
        path = tmp_path / "out.json"
        assert main(["simulate", name, "--trace", trace, "--steps", of_h200, "--json", str(path)]) == 0
        said = f"weights in {kind}: {saved_ms:.2f} ms less a step by their bytes; products as measured"
        assert (said in capsys.readouterr().out) is (name != LOCAL)
        medians[name] = json.loads(path.read_text())["p50_tpot_ms"]
    assert medians[LOCAL] - medians[str(config)] == pytest.approx(saved_ms, abs=0.3)
    assert main(["simulate", str(config), "--trace", trace, "--steps", STEPS]) != 0
    assert "model.quantise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        (["--rate-scale", "0"], "rate scale"),
        (["--replicas", "0", "1"], "--replicas"),
        (["--goodput", "speed:5"], "goodput"),
        (["--kv-tokens", "512", "512"], "max_model_len"),
        (["--duration-s", "-1"], "no request is left"),
        (["--acceptance", "0.6", "0.8"], "with this speculative.method"),
    ],
)
def test_wrong_options_are_named(trace: str, extra: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", LOCAL, "--trace", trace, "--steps", STEPS, *extra]) != 0
    assert wanted in capsys.readouterr().err


def test_wrong_step_file_is_named(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"source": "x", "kv_bytes_per_token": 1, "decode": {"base_s": -1}, "prefill": {"base": 1}}')
    assert main(["simulate", LOCAL, "--trace", trace, "--steps", str(path)]) == 2
    errors = capsys.readouterr().err
    assert "decode.base_s" in errors
    assert "prefill.base" in errors


def test_plot_without_matplotlib_says_what_to_install(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.simulation.plot.find_spec", lambda name: None)
    assert main(["simulate", LOCAL, "--trace", trace, "--steps", STEPS, "--plot", "x.png"]) == 1
    assert "splitserve[plot]" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_plot(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    assert main(["simulate", LOCAL, "--trace", trace, "--steps", STEPS, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


ENTRIES = [TraceEntry(100.0 + second, 1000, 100) for second in range(1000)]


def test_rate_scale_copies_and_thins() -> None:
    assert len(trace_jobs(ENTRIES, TraceScale(rate=3.0), 4096)) == 3000
    half = trace_jobs(ENTRIES, TraceScale(rate=0.5), 4096)
    assert 400 < len(half) < 600
    jobs = trace_jobs(ENTRIES, TraceScale(rate=2.5), 4096)
    assert 2400 < len(jobs) < 2600
    assert [job.index for job in jobs] == list(range(len(jobs)))
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(jobs))
    assert jobs == trace_jobs(ENTRIES, TraceScale(rate=2.5), 4096)
    assert jobs != trace_jobs(ENTRIES, TraceScale(rate=2.5, seed=1), 4096)


def test_copies_do_not_pile_up_at_the_ends() -> None:
    jobs = trace_jobs(ENTRIES[:100], TraceScale(rate=50.0), 4096)
    first, last = (sum(low <= job.arrival_s < low + 5 for job in jobs) for low in (0.0, 94.0))
    assert 150 < first < 350
    assert 150 < last < 350


def test_lengths_fit_the_model() -> None:
    (job, *_) = trace_jobs(ENTRIES, TraceScale(length=2.0), 2048)
    assert (job.prompt_len, job.output_len, job.max_tokens) == (2000, 48, 48)
    (job, *_) = trace_jobs(ENTRIES, TraceScale(max_tokens=512), 4096)
    assert (job.output_len, job.max_tokens) == (100, 512)
    assert len(trace_jobs(ENTRIES, TraceScale(duration_s=10.0), 4096)) == 10
    assert len(trace_jobs(ENTRIES, TraceScale(max_requests=7), 4096)) == 7
