"""What of the replicas' log is shown in the terminal, and how; all of it is in the file."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.terminal.log_file import LogFile
from cluster.terminal.replica_line import parse_line
from cluster.terminal.replica_log import ReplicaLog
from cluster.terminal.terminal import Terminal
from replicas.structured_log import JsonFormatter


def logged(message: str, *arguments: object, level: int = logging.INFO, **extra: object) -> str:
    """A line as a replica writes it."""
    record = logging.getLogger("cluster.x").makeRecord(
        "cluster.x", level, "f.py", 1, message, arguments, None, "f", extra
    )
    return JsonFormatter().format(record)


def failed(message: str) -> str:
    try:
        raise KeyError("the cause")
    except KeyError:
        record = logging.LogRecord("replicas.y", logging.ERROR, "f.py", 1, message, (), sys.exc_info())
    return JsonFormatter().format(record)


class Rig:
    def __init__(self, folder: Path, is_json: bool = False) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.terminal = Terminal(is_json, self.out, self.err)
        self.file = LogFile(folder / "serve.log")
        self.log = ReplicaLog(self.file, self.terminal, is_json)

    def take(self, *lines: str, actor: str = "ServeReplica:splitserve:decode", pid: object = 7) -> None:
        self.log.take({"actor_name": actor, "pid": pid, "lines": list(lines), "is_err": True})

    @property
    def shown(self) -> list[str]:
        """Without their time of day."""
        return [line.partition(" ")[2] if line[2:3] == ":" else line for line in self.err.getvalue().splitlines()]

    @property
    def written(self) -> str:
        return self.file.path.read_text()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.file.close()


def test_chatter_goes_into_the_file_only(rig: Rig) -> None:
    chatter = [
        "[1796] UCX WARN something",
        "2026 NIXL INFO",
        "Traceback (most recent call last):",
        '{"a": 1}',
        "{",
        "[1]",
    ]
    rig.take(*chatter, '{"logger": "ray.x", "level": "ERROR", "event": "e", "message": "m", "ts": "2026-01-01"}')
    rig.take(logged("layers replaced", event="layers"))
    rig.take("WARNING 2026-11-29 10:57:19,086 controller 2 -- Replica crashed", actor="ServeController", pid=2)
    assert rig.shown == []
    assert all(f"(decode 7) {line}\n" in rig.written for line in chatter)
    assert "INFO decode 7: layers replaced\n" in rig.written
    assert "(controller 2) WARNING 2026-11-29 10:57:19,086" in rig.written


def test_the_status_of_rays_autoscaler_is_of_no_use(rig: Rig) -> None:
    rig.take("======== Autoscaler status", actor="", pid="autoscaler")
    assert rig.written == ""


def test_warnings_and_errors_of_ours_are_shown_in_one_line_each(rig: Rig) -> None:
    rig.take(logged("replica lost", level=logging.WARNING, event="replica_lost", why="dead"), failed("request failed"))
    assert rig.shown == [
        "WARNING decode 7: replica lost why=dead",
        "ERROR decode 7: request failed exception=KeyError: 'the cause'",
    ]
    assert "Traceback (most recent call last):\n" in rig.written
    assert "KeyError: 'the cause'\n" in rig.written


def test_what_several_say_at_a_time_is_shown_once(rig: Rig) -> None:
    for pid in (7, 8, 9):
        rig.take(logged("no second lane", level=logging.WARNING), pid=pid)
        rig.take(logged("attempt failed", level=logging.WARNING, stage="decode", generation=f"id{pid}"), pid=pid)
    rig.take(logged("attempt failed", level=logging.WARNING, stage="prefill", generation="id7"))
    assert rig.shown == [
        "WARNING decode 7: no second lane",
        "WARNING decode 7: attempt failed stage=decode generation=id7",
        "WARNING decode 7: attempt failed stage=prefill generation=id7",
    ]
    assert rig.written.count("no second lane") == 3


def test_requests_are_shown_each(rig: Rig) -> None:
    line = logged(
        "%s %s %d", "POST", "/v1/x", 200, event="access", method="POST", path="/v1/x", status=200, tokens_in=3
    )
    rig.take(line, line, actor="ServeReplica:splitserve:ingress", pid=5)
    assert rig.shown == ["INFO ingress 5: POST /v1/x 200 tokens_in=3"] * 2


def test_a_scale_event_of_the_controller_is_a_sentence(rig: Rig) -> None:
    text = "INFO 2026-11-29 10:56:49,520 controller 26584 -- autoscaling: decode 1 -> 3 (455 KV blocks waiting)"
    rig.take(text, actor="ServeController", pid=26584)
    assert rig.err.getvalue() == "10:56:49 INFO autoscaling: decode 1 -> 3 (455 KV blocks waiting)\n"


def test_nothing_in_a_line_drives_the_terminal(rig: Rig) -> None:
    rig.take(logged("GET %s 404", "/\x1b[31m\nx", event="access"), logged("w\r", level=logging.WARNING, of="\x07"))
    assert rig.shown == ["INFO decode 7: GET /\\x1b[31m\\nx 404", "WARNING decode 7: w\\r of=\\x07"]
    assert "\x1b" not in rig.written


def test_a_line_that_is_not_what_it_seems_harms_nothing(rig: Rig) -> None:
    rig.terminal.begin_steps()
    rig.take(logged("loading", event="start_step", state="running", done="many"), logged("w", level=logging.WARNING))
    assert rig.shown == ["WARNING decode 7: w"]
    assert parse_line('{"logger": "cluster.x", "ts": "yesterday", "level": "INFO", "event": "", "message": ""}') is None


def test_steps_of_a_start_are_shown_while_somebody_waits_for_it(rig: Rig) -> None:
    rig.terminal.begin_steps()
    steps = [
        logged("loading weights", event="start_step", state="begun"),
        logged("hashing", event="start_step", state="begun", total=9, unit="bytes"),
        logged("hashing", event="start_step", state="done", seconds=0.2),
        logged("loading weights", event="start_step", state="done", seconds=1.5),
        logged("ready after %.1f s", 2.0, event="replica_ready"),
    ]
    rig.take(*steps)
    shown = rig.err.getvalue().splitlines()
    assert shown[0] == "splitserve: decode 7: loading weights (1.5 s)"
    assert shown[1].startswith("splitserve: decode 7: ready (")
    assert len(shown) == 2
    rig.terminal.end_steps()
    rig.take(*steps, pid=8)
    assert rig.shown[2:] == ["INFO decode 8: ready after 2.0 s"]


def test_for_log_collectors_every_line_is_json(tmp_path: Path) -> None:
    rig = Rig(tmp_path, is_json=True)
    rig.terminal.say("stopping", "stopping")
    rig.take(logged("%s", "a", event="access", status=200), failed("broken"), logged("not shown"))
    shown: list[dict[str, Any]] = [json.loads(line) for line in rig.err.getvalue().splitlines()]
    assert [line["event"] for line in shown] == ["stopping", "access", "None"]
    assert (shown[1]["status"], shown[1]["process"], shown[1]["level"]) == (200, "decode 7", "INFO")
    assert "Traceback" in shown[2]["exception"]
    assert [json.loads(line)["message"] for line in rig.written.splitlines()] == ["a", "broken", "not shown"]
    rig.file.close()


def test_a_terminal_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.err.close()
    rig.take(logged("w", level=logging.WARNING))
    assert "WARNING decode 7: w\n" in rig.written
    rig.file.close()
