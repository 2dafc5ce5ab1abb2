"""Steps that are shown as they go on: rows in a terminal, lines without a control character everywhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.terminal.steps import Steps


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich heeds, but a file is no place for colours


def lines_of(use: object = None) -> tuple[io.StringIO, Clock, Steps]:
    stream, clock = io.StringIO(), Clock()
    return stream, clock, Steps(stream, clock)


def test_without_a_terminal_each_step_is_a_line_when_it_ends() -> None:
    stream, clock, steps = lines_of()
    with steps, steps.step("loading"):
        clock.now_s = 2.5
    assert stream.getvalue() == "splitserve: loading (2.5 s)\n"


def test_a_long_one_says_every_ten_seconds_how_far_it_is() -> None:
    stream, clock, steps = lines_of()
    with steps, steps.step("model.safetensors", total=400_000_000, unit="bytes") as step:
        for _ in range(4):
            clock.now_s += 6.0
            step.advance(100_000_000)
    assert stream.getvalue().splitlines() == [
        "splitserve: model.safetensors: 200 of 400 MB, 50 %",
        "splitserve: model.safetensors: 400 of 400 MB, 100 %",
        "splitserve: model.safetensors (24.0 s)",
    ]


def test_what_is_counted_may_have_any_unit_and_no_end() -> None:
    stream, clock, steps = lines_of()
    for total, unit in ((40, "graphs"), (None, "requests"), (7, "")):
        step = steps.begin("x", total, unit)
        clock.now_s += 10.0
        step.reached(7)
    assert stream.getvalue().splitlines() == [
        "splitserve: x: 7 of 40 graphs, 17 %",
        "splitserve: x: 7 requests",
        "splitserve: x: 7 of 7, 100 %",
    ]


def test_a_failed_step_is_told_by_who_catches_the_error() -> None:
    stream, _, steps = lines_of()
    with pytest.raises(OSError), steps, steps.step("loading"):
        raise OSError
    assert stream.getvalue() == ""


@contextmanager
def terminal() -> Iterator[tuple[io.TextIOWrapper, list[str]]]:
    """A stream to a pseudo-terminal; what was written is in the list afterwards."""
    ours, theirs = pty.openpty()
    shown: list[str] = []
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        yield stream, shown
        stream.flush()
        os.set_blocking(ours, False)
        pieces = []
        try:
            while piece := os.read(ours, 65_536):
                pieces.append(piece)
        except BlockingIOError:
            pass
        shown.append(b"".join(pieces).decode())
    os.close(ours)


def plain(text: str) -> list[str]:
    """Lines as they were at some time."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)) if line]


def test_who_begins_a_step_when_all_has_ended_begins_no_rows() -> None:
    """Ray's thread has looked where steps are shown, then the start is over, then it begins one of its line."""
    with terminal() as (stream, _):
        steps = Steps(stream)
        steps.begin("starting replicas")
        steps.close()
        try:
            steps.begin("decode-0").done()
            assert not any(map(_moves_rows, threading.enumerate())), "they go on for as long as the server runs"
        finally:
            steps.close()


def _moves_rows(thread: Any) -> bool:
    return type(thread).__module__ == "rich.live" and not thread.done.is_set()


def test_in_a_terminal_rows_move_and_stay() -> None:
    with terminal() as (stream, shown), Steps(stream) as steps:
        with steps.step("downloading", total=3_000_000, unit="bytes") as step:
            step.advance(1_000_000)
            steps.say("[red]a line[/red] of somebody else")
            step.advance(1_000_000)
        failed = steps.begin("another")
        failed.failed()
    lines = plain(shown[0])
    assert re.match(r"✓ downloading +0:\d\d:\d\d", lines[-2]), lines
    assert "another: failed" in lines[-1]
    assert [line.count("[red]a line[/red] of somebody else") for line in lines if "else" in line] == [1]
    assert "\x1b[?25h" in shown[0], "the cursor is shown again"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as (stream, shown), Steps(stream) as steps, steps.step("loading"):
        pass
    assert re.fullmatch(r"splitserve: loading \(\d+\.\d s\)\r\n", shown[0])
