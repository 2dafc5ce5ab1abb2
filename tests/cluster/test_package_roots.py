"""Other people's packages of our names, and the packages of ours as they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.serving.package_roots import check_package_roots
from cluster.user_error import UserError
from cluster.version import VERSION

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["cluster", "replicas", "scheduler"])
@pytest.mark.parametrize("as_package", [True, False])
def test_a_file_of_ours_name_where_the_command_is_run_is_refused(name: str, as_package: bool, tmp_path: Path) -> None:
    """Ray's processes would import it in the place of ours."""
    file = tmp_path / name / "__init__.py" if as_package else tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(UserError, match="run it in another one") as caught:
        check_package_roots(tmp_path)
    assert str(file) in str(caught.value)


def test_a_mere_folder_of_that_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    check_package_roots(tmp_path)
    check_package_roots(ROOT)


def test_packages_in_two_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "scheduler", raising=False)
    with pytest.raises(UserError, match=f"must lie in one folder, but Python finds .*scheduler in {tmp_path}"):
        check_package_roots(tmp_path.parent)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of this folder, unpacked as pip unpacks it: not editable, and alone."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # setuptools writes beside what it packs
    for name in ("cluster", "replicas", "scheduler"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", folder / "packages", source], check=True, env=_environment(None))
    return folder / "packages"


def test_what_pip_installs_runs_from_anywhere(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my-config.yaml").write_text((ROOT / "configs/local.yaml").read_text())
    command = installed / "bin/splitserve"
    version = _run([command, "--version"], installed, tmp_path)
    assert version == f"splitserve {VERSION}\n"
    checked = _run([command, "check", "my-config.yaml"], installed, tmp_path)
    assert "model     SmolLM2-135M-Instruct" in checked
    assert checked.endswith("\nok\n")
    where = _run([sys.executable, "-c", "import cluster; print(cluster.__file__)"], installed, tmp_path)
    assert where == f"{installed / 'cluster/__init__.py'}\n"


def test_what_pip_installs_is_all_there_is(installed: Path) -> None:
    """Files that are no Python too, and who may be run can be."""
    tracked = subprocess.run(
        ["git", "ls-files", "cluster", "replicas", "scheduler"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    found = {str(file.relative_to(installed)) for file in installed.rglob("*") if file.is_file()}
    assert "cluster/http/haproxy.sh" in found
    assert set(tracked) <= found
    assert os.access(installed / "cluster/http/haproxy.sh", os.X_OK)


def _environment(packages: Path | None) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": str(packages)} if packages else {})


def _run(command: list[object], packages: Path, folder: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=_environment(packages), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
