"""`python -m benchmarks` around benchmarks that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as command


def test_writes_one_file_for_each_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes = {"one": lambda short: ({"x": 1.23456789, "short": short}, "a table"), "two": lambda short: ({}, "")}
    monkeypatch.setattr(command, "_BENCHMARKS", fakes)
    assert command.main(["--results", str(tmp_path / "new")]) == 0
    first, _ = sorted((tmp_path / "new").iterdir())
    assert first.name.endswith("-one.json")
    written = json.loads(first.read_text())
    assert written["one"] == {"x": 1.235, "short": True}
    assert written["machine"]["cores"] >= 1
    assert command.main(["one", "--full", "--results", str(tmp_path / "new")]) == 0
    assert f"replaced: {first}" in capsys.readouterr().out
    assert json.loads(first.read_text())["one"]["short"] is False


def test_a_failed_part_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_BENCHMARKS", {"one": lambda _: ({"mode": {"error": "no"}}, "no")})
    assert command.main(["--results", str(tmp_path)]) == 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["nothing"])
