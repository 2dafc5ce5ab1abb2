"""The log of all replicas, as Ray brings it to the process that started them: into the file, and what concerns people
to the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.terminal.log_file import LogFile
from cluster.terminal.replica_line import ReplicaLine, parse_line, process_of
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
        process = process_of(batch)
        for text in batch.get("lines", ()):
            try:
                self._take(text, process)
            except Exception as error:  # Ray's thread would end with it, and with that the log
                self._file.write(f"({process}) {text} [not understood: {error!r}]")

    def _take(self, text: str, process: str) -> None:
        line = parse_line(text)
        if line is None:
            self._file.write(f"({process}) {text}")
            return
        self._file.write(self._whole(line, process))
        if line.event in (START_STEP, "replica_ready"):
            self._follow(line, process)
        elif line.is_for_the_terminal:
            self._terminal.show(line, process)

    def _whole(self, line: ReplicaLine, process: str) -> str:
        """For the file: exceptions with all their lines."""
        if self._is_json:
            return line.as_json(process)
        return line.as_text(process) if line.exception is None else f"{line.as_text(process)}\n{line.exception}"

    def _follow(self, line: ReplicaLine, process: str) -> None:
        """A row for each replica that starts, while somebody looks on; later a line when it is ready."""
        steps = self._terminal.steps_of_start
        if steps is None:
            if line.event != START_STEP:
                self._terminal.show(line, process)
            return
        row = self._rows.get(process)
        if row is None:
            row = self._rows[process] = steps.begin(process)
        state, step = line.fields.get("state"), f"{process}: {line.message}"
        begun = self._begun.setdefault(process, [])
        if line.event != START_STEP:
            row.done(f"{process}: ready")
        elif state == "begun":
            begun.append(step)
            row.turns_to(step, line.fields.get("total"), line.fields.get("unit", ""))
        elif state == "running":
            row.reached(line.fields.get("done", 0))
        else:
            del begun[-1:]
            row.turns_to(begun[-1] if begun else process)
            if line.fields.get("seconds", 0.0) >= _TOLD_S:
                row.tell(f"{step} ({line.fields['seconds']} s)")
