"""The log of all replicas, as Ray brings it to the process that started them: into the file, and what concerns people
to the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.terminal.log_file import LogFile
from cluster.terminal.replica_line import ReplicaLine, parse_line, source_of
from cluster.terminal.steps import Step
from cluster.terminal.terminal import Terminal
from replicas.start_step import EVENT as START_STEP

# Ray's, of machines, of which there is one: the same twenty lines every five seconds.
_AUTOSCALER = "autoscaler"
_TOLD_S = 1.0  # where no rows move, a step that took less is not worth a line


class ReplicaLog:
    """`take` is called on one thread of Ray's."""

    def __init__(self, file: LogFile, terminal: Terminal, is_json: bool) -> None:
        self._file, self._terminal, self._is_json = file, terminal, is_json
        self._rows: dict[str, Step] = {}
        self._begun: dict[str, list[str]] = {}  # by replica: steps within steps

    def take(self, batch: Mapping[str, Any]) -> None:
        """Some lines of one process. Never raises."""
        if batch.get("pid") == _AUTOSCALER:
            return
        source = source_of(batch)
        for text in batch.get("lines", ()):
            line = parse_line(text)
            if line is None:
                self._file.write(f"({source}) {text}")
                continue
            self._file.write(self._whole(line, source))
            if line.event in (START_STEP, "replica_ready"):
                self._follow(line, source)
            elif line.is_for_the_terminal:
                self._terminal.show(line, source)

    def _whole(self, line: ReplicaLine, source: str) -> str:
        """For the file: exceptions with all their lines."""
        if self._is_json:
            return line.as_json(source)
        return line.as_text(source) if line.exception is None else f"{line.as_text(source)}\n{line.exception}"

    def _follow(self, line: ReplicaLine, source: str) -> None:
        """A row for each replica that starts, while somebody looks on; later a line when it is ready."""
        steps = self._terminal.steps_of_start
        if steps is None:
            if line.event != START_STEP:
                self._terminal.show(line, source)
            return
        row = self._rows.get(source)
        if row is None:
            row = self._rows[source] = steps.begin(source)
        state, step = line.fields.get("state"), f"{source}: {line.message}"
        begun = self._begun.setdefault(source, [])
        if line.event != START_STEP:
            row.done(f"{source}: ready")
        elif state == "begun":
            begun.append(step)
            row.turns_to(step, line.fields.get("total"), line.fields.get("unit", ""))
        elif state == "running":
            row.reached(line.fields.get("done", 0))
        else:
            del begun[-1:]
            row.turns_to(begun[-1] if begun else source)
            if line.fields.get("seconds", 0.0) >= _TOLD_S:
                row.tell(f"{step} ({line.fields['seconds']} s)")
