"""docs/reliability.md maps 30 faults to rows of `make chaos` and to tests: all of them are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.chaos.rows import ROWS

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \|([^|]*)\| (.+) \|$", re.MULTILINE)
MATRIX = _ROW.findall((ROOT / "docs/reliability.md").read_text())


def test_there_are_30_and_each_is_tried_somehow() -> None:
    assert [int(number) for number, *_ in MATRIX] == [*range(1, 31)]


@pytest.mark.parametrize(("number", "fault", "rows", "tests"), MATRIX)
def test_what_is_named_is_there(number: str, fault: str, rows: str, tests: str) -> None:
    assert [name for name in filter(None, rows.strip().split(", ")) if name not in ROWS] == []
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", tests)
    assert named, f"{number} {fault}: no test"
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{number} {fault}: {file} has no {name}"


def test_every_row_of_make_chaos_is_of_some_fault() -> None:
    named = {name for _, _, rows, _ in MATRIX for name in rows.strip().split(", ")}
    assert ROWS.keys() - named == {"nothing", "kill prefill and decode"}
