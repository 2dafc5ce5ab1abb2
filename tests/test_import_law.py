"""The law of imports, cluster > replicas > scheduler, and of file sizes; see also the contracts in pyproject.toml."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "replicas", "scheduler")
MAX_LINES = 300


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_packages(file: Path) -> Iterator[str]:
    """Top-level names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0] if node.level == 0 else file.relative_to(ROOT).parts[0]


def imports_of(folder: str) -> set[tuple[str, str]]:
    return {(str(file.relative_to(ROOT)), name) for file in python_files(folder) for name in imported_packages(file)}


def own_imports() -> Iterator[tuple[Path, Path]]:
    """Which of our files imports which, by any statement in it."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in python_files(*PACKAGES)}
    for file in files.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from ((file, files[name]) for name in names if name in files)


@pytest.mark.parametrize("is_of_folders", [False, True])
def test_imports_go_in_no_circle(is_of_folders: bool) -> None:
    """Neither from file to file nor from folder to folder; the order of the floors is in pyproject.toml."""
    below: defaultdict[Path, set[Path]] = defaultdict(set)
    for file, imported in own_imports():
        upper, lower = (file.parent, imported.parent) if is_of_folders else (file, imported)
        if upper != lower:
            below[upper].add(lower)
    assert len(below) > 15
    order = list(TopologicalSorter(below).static_order())  # raises CycleError, which names the circle
    low, high = ("scheduler", "cluster/serving") if is_of_folders else ("scheduler/plan.py", "cluster/serving/app.py")
    assert order.index(ROOT / low) < order.index(ROOT / high)


def test_scheduler_is_standard_library_only() -> None:
    allowed = sys.stdlib_module_names | {"scheduler"}
    assert {(file, name) for file, name in imports_of("scheduler") if name not in allowed} == set()


def test_replicas_do_not_import_cluster() -> None:
    assert {(file, name) for file, name in imports_of("replicas") if name == "cluster"} == set()


def test_cluster_does_not_import_torch() -> None:
    assert {(file, name) for file, name in imports_of("cluster") if name == "torch"} == set()


def imported_modules(file: Path) -> Iterator[str]:
    """Full names, of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_nothing_below_the_simulator_imports_it() -> None:
    """But the command line: its options when it starts, the rest when it is asked for (test_check_command.py)."""
    simulator = ROOT / "cluster" / "simulation"
    files = [file for file in python_files(*PACKAGES) if simulator not in file.parents]
    found = {
        str(file.relative_to(ROOT))
        for file in files
        if any(name.startswith("cluster.simulation") for name in imported_modules(file))
    }
    assert found == {"cluster/serving/command_line.py"}


def test_files_outside_tests_are_short() -> None:
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = python_files(*(folder for folder in folders if folder not in {"tests", "build", "dist"}))
    assert files
    num_lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {file: lines for file, lines in num_lines.items() if lines > MAX_LINES} == {}


def test_each_file_says_what_it_is() -> None:
    command = [sys.executable, ROOT / "docs/list_files.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = set(re.findall("^- `([a-z_0-9]+)` .{10,}", made.stdout, re.MULTILINE))
    assert {file.stem for file in python_files(*PACKAGES)} - listed == {"__init__"}


def test_no_file_is_named_like_a_standard_module() -> None:
    # `python -m` and Ray put folders on sys.path: such a file would stand in for the real one.
    names = {str(path.relative_to(ROOT)) for path in python_files(*PACKAGES) if path.stem in sys.stdlib_module_names}
    assert names == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_package_loads_from_this_checkout(package: str) -> None:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / package / "__init__.py")


def test_no_other_distribution_provides_our_names() -> None:
    owners = importlib.metadata.packages_distributions()
    foreign = {name: set(owners.get(name, ())) - {"splitserve"} for name in PACKAGES}
    assert foreign == {name: set() for name in PACKAGES}


def test_constraints_pin_every_dependency() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints/cpu.txt").read_text().splitlines()}
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    names = {re.split(r"[\[><=]", quoted)[0].lower() for quoted in re.findall(r'^    "([^"]+)"', block, re.MULTILINE)}
    assert {name.replace("_", "-") for name in names} - {name.replace("_", "-") for name in pinned} == set()
