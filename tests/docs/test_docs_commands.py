"""Every command that README.md and the other documents offer is read from there and tried, as command_table.py says."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.file import config_of, load_for_elsewhere
from tests.docs.command_blocks import DOCUMENTS, ROOT, Block, Command, blocks, commands
from tests.docs.command_table import EXAMPLES, TABLE, Trial, row_of
from tests.helm.chart import render

BLOCKS = [block for file in DOCUMENTS for block in blocks(file)]
SETTINGS = [block for block in BLOCKS if block.settings is not None]
COMMANDS = [
    command
    for block in BLOCKS
    if block.settings is None and block.language in ("", "bash", "sh", "console")
    for command in commands(block)
]
_OWN_FOLDERS = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir())


def of_trial(*trials: Trial) -> Any:
    found = [command for command in COMMANDS if (row := row_of(command)) and row.trial in trials]
    return pytest.mark.parametrize(
        "command", [pytest.param(command, id=command.text[:80]) for command in dict.fromkeys(found)]
    )


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    assert [f"{command.place}: {command.text}" for command in COMMANDS if row_of(command) is None] == []
    assert {row_of(command) for command in COMMANDS} == set(TABLE)
    assert len(COMMANDS) > 50
    assert all(row.why or row.trial in (Trial.RUN, Trial.SERVER) for row in TABLE)


def test_every_block_is_commands_settings_or_something_else_by_its_fence() -> None:
    others = {block.language for block in BLOCKS if block.settings is None} - {"", "bash", "sh", "console"}
    assert others <= {"mermaid", "python", "text"}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a clone has; what a command writes lands here."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@of_trial(Trial.RUN)
def test_run(command: Command, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run_python(command, monkeypatch)
    assert code == 0, output
    assert output.strip()
    written = [word for option, word in zip(command.words, command.words[1:], strict=False) if option in WRITES]
    assert [name for name in written if not (clone / name).stat().st_size] == []


WRITES = ("--output", "--json", "--plot")


@of_trial(Trial.OPTIONS)
def test_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_options_known(command, monkeypatch)
    assert_files_there(command.words)
    if command.words[:2] == ("splitserve", "serve") and command.words[2].endswith(".yaml"):
        load_for_elsewhere(str(ROOT / command.words[2]))  # what is asked for is not on this machine: GPUs


@of_trial(Trial.SERVER)
def test_what_is_asked_of_a_server_is_there(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_files_there(command.words)
    if command.words[0] == "curl":
        (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\S*)", command.text)
        assert path in (ROOT / "cluster/http/app.py").read_text()
    else:
        assert_options_known(command, monkeypatch)


@of_trial(Trial.MAKE)
def test_make(command: Command, tmp_path: Path) -> None:
    """A dry run, with the variables that the Makefile has, and pytest's own words for what it shall run."""
    _, target, *variables = command.words
    makefile = (ROOT / "Makefile").read_text()
    for name, value in (variable.split("=", 1) for variable in variables):
        assert re.search(rf"^{name}\s*\?=", makefile, re.MULTILINE), name
        if name == "ARGS" and target == "test":
            words = shlex.split(value)
            assert_files_there(words)
            marks = re.findall(r"\w+", words[words.index("-m") + 1]) if "-m" in words else []
            assert {mark for mark in marks if mark != "not"} <= registered_marks()
    done = subprocess.run(["make", "--dry-run", target, *variables], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@of_trial(Trial.CHART)
def test_chart(command: Command) -> None:
    values: dict[str, Any] = {}
    for option, word in zip(command.words, command.words[1:], strict=False):
        if option == "--set":
            key, value = word.split("=", 1)
            place = values
            *above, last = key.split(".")
            for part in above:
                place = place.setdefault(part, {})
            place[last] = yaml.safe_load(value)
    assert command.words[2:4] == ("splitserve", "./helm")
    repository = values.get("image", {}).get("repository", "splitserve")
    images = {pod["spec"]["containers"][0]["image"] for _, pod in render(values).pods()}
    assert images == {f"{repository}:0.1.0"}


@of_trial(Trial.NAMED)
def test_files_that_are_named(command: Command) -> None:
    assert_files_there(command.words)


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.place)
def test_settings(block: Block) -> None:
    """Of a config, or values of the chart."""
    values: dict[str, Any] = block.settings or {}
    if "placement" in values or "config" in values:
        assert render(values).service
    else:
        assert config_of(values).pools.deployed()


def run_python(command: Command, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, str]:
    """In this process, as from a shell: exit code, and what was printed."""
    words = [EXAMPLES.get(word, word) for word in command.words]
    if words[0] == "splitserve":
        module, arguments = "cluster.serving.command_line", words[1:]
    else:
        assert words[:2] == ["python", "-m"]
        module, arguments = words[2], words[3:]
    monkeypatch.setattr(sys, "argv", [module, *arguments, *more])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), _fresh(module):
        try:
            runpy.run_module(module, run_name="__main__")
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    return code if isinstance(code, int) else 1, output.getvalue()


@contextlib.contextmanager
def _fresh(module: str) -> Iterator[None]:
    """It runs beside the one that tests have imported, which stays."""
    kept = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if kept is not None:
            sys.modules[module] = kept


def assert_options_known(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the help of the program, and of its subcommand where there is one."""
    num_words = 3 if command.words[0] == "python" else 2
    known = ("admission", "scale", "autoscaling", "lanes", "drafts", "parts", "bursts", "pairs", "roles")
    subcommands = [word for word in command.words[num_words:] if word in known]
    helps = ""
    for words in {command.words[:num_words], (*command.words[:num_words], *subcommands)}:
        code, output = run_python(Command(command.place, words), monkeypatch, "--help")
        assert code == 0, output
        helps += output
    for option in (word.split("=")[0] for word in command.words if word.startswith("--")):
        assert re.search(rf"{option}\b", helps), option


def assert_files_there(words: Any) -> None:
    """Files of this project, by their folder; what a command writes, or a reader has, is not looked for."""
    for word in words:
        name = word.rpartition("=")[2].removeprefix("./")
        if name.startswith(_OWN_FOLDERS) and " " not in name:
            assert (ROOT / name).exists(), name


def registered_marks() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    return set(re.findall(r'^    "(\w+): ', text, re.MULTILINE))
