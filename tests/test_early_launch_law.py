"""Kernels that are launched early wait before they touch what others compute. No run shows who does not: a card gives
right numbers most of the time, and neither the interpreter nor a CPU launches anything early."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "replicas" / "kernels"
WEIGHTS = {"weight", "factors", "scales"}  # never change: may be read before the wait
NUMBERS = re.compile(r"num_\w+|part_\w+|\w+_stride|IS_\w+")
WAIT, LET_IN = "wait_for_earlier", "let_next_in"
EARLY = [path for path in sorted(KERNELS.glob("*.py")) if f"{WAIT}(" in path.read_text()]
LAW = KERNELS / "dependent_launch.py"


def faults_of(source: str) -> list[str]:
    """What its kernels do against the law of `dependent_launch`."""
    tree = ast.parse(source)
    jitted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    launched = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    kernels = [kernel for kernel in jitted if kernel.name in launched]
    return [f"{kernel.name} {fault}" for kernel in kernels for fault in _faults(kernel)]


def _faults(kernel: ast.FunctionDef) -> list[str]:
    waits = [number for number, statement in enumerate(kernel.body) if _is_call(statement, WAIT)]
    if len(waits) != 1:
        return [f"waits {len(waits)} times in its outermost statements"]
    before, wait, behind = kernel.body[: waits[0]], kernel.body[waits[0]], kernel.body[waits[0] + 1 :]
    constants = {argument.arg for argument in kernel.args.args if argument.annotation is not None}
    given = {argument.arg for argument in kernel.args.args} - constants - WEIGHTS
    touched = {name for name in given & _names(before) if not NUMBERS.fullmatch(name)}
    found = [f"touches {name} before it waits" for name in sorted(touched)]
    return found + _let_in_faults(wait, before, behind)


def _let_in_faults(wait: ast.stmt, before: list[ast.stmt], behind: list[ast.stmt]) -> list[str]:
    """Who does not let the next kernel in as it waits does so once, later."""
    asked = re.fullmatch(rf"{WAIT}\(IS_EARLY(?:, (?:LETS_IN=)?(False|LETS_IN))?\)", ast.unparse(wait))
    if asked is None:
        return [f"waits otherwise: {ast.unparse(wait)}"]
    text = "\n".join(map(ast.unparse, behind))
    if any(LET_IN in ast.unparse(statement) for statement in before):
        return ["lets others in before it waits"]
    is_late = {None: 0, "False": 1, "LETS_IN": 1}[asked[1]]
    if text.count(f"{LET_IN}(IS_EARLY)") != is_late:
        return [f"lets others in {text.count(LET_IN)} times behind its wait, not {is_late}"]
    if asked[1] == "LETS_IN" and not re.search(rf"if not LETS_IN:\s+{LET_IN}\(IS_EARLY\)", text):
        return ["lets others in a second time"]
    return []


def _is_call(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(f"{name}(")


def _names(statements: list[ast.stmt]) -> set[str]:
    """Names that are used, but for those whose type alone is asked for."""
    types = {
        id(node.value)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and node.attr == "dtype"
    }
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in types}


@pytest.mark.parametrize("path", [path for path in EARLY if path != LAW], ids=lambda path: path.stem)
def test_kernels_wait_before_they_touch_what_others_compute(path: Path) -> None:
    assert faults_of(path.read_text()) == []


def test_whoever_is_launched_early_is_looked_at() -> None:
    early = {path.name for path in KERNELS.glob("*.py") if "launch_pdl" in path.read_text()}
    assert len(early) > 10
    assert early <= {path.name for path in EARLY}


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("gated_rows", f"    {WAIT}(IS_EARLY, LETS_IN=False)\n", "", "_gated_rows waits 0 times"),
        ("gated_rows", f"    {LET_IN}(IS_EARLY)\n", "", "_gated_rows lets others in 0 times"),
        ("gated_rows", ", LETS_IN=False)", ")", "_gated_rows lets others in 1 times behind its wait, not 0"),
        ("paged_decode", "    if not LETS_IN:\n", "    if True:\n", "_attend_piece lets others in a second time"),
        ("paged_decode", f"    {LET_IN}(IS_EARLY)\n", "    pass\n", "_attend_piece lets others in 0 times"),
        ("gemv", f"    {WAIT}(", f"    tl.load(x)\n    {WAIT}(", "_gemv touches x before it waits"),
        ("rotation", f"    {WAIT}(", f"    if HAS_NORMS: {WAIT}(", "_rotate waits 0 times"),
    ],
)  # fmt: skip
def test_a_kernel_that_breaks_the_law_is_found(file: str, old: str, new: str, fault: str) -> None:
    source = (KERNELS / f"{file}.py").read_text()
    assert source.count(old) == 1
    (found,) = faults_of(source.replace(old, new))
    assert fault in found
