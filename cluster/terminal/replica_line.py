"""A line of a replica's log: what it says, and whether it is for the terminal. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from replicas.structured_log import printable, text_line

# Of what is no warning: what somebody who looks on wants to know.
_SHOWN = frozenset({"access", "throughput", "scaled", "replica_ready", "replica_gone", "replica_recovered"})
_ALARMING = frozenset({"WARNING", "ERROR", "CRITICAL"})
_OWN_LOGGERS = ("cluster.", "replicas.", "scheduler.")
# Our policy in Serve's controller has Serve's logger, which on stderr writes text whatever it is told.
_SCALING = re.compile(r"(INFO|WARNING|ERROR) (\d+-\d+-\d+ \d+:\d+:\d+,\d+) controller \d+ -- (autoscaling): (.*)")


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """What one of our processes has logged. at_s: Unix time. source: who says it, where it is not the process."""

    at_s: float
    level: str
    event: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    exception: str | None = None
    source: str = ""

    @property
    def is_for_the_terminal(self) -> bool:
        return self.level in _ALARMING or self.event in _SHOWN

    def as_text(self, process: str) -> str:
        """For people. In one line: of an exception, its last one."""
        fields = dict(self.fields)
        if self.exception is not None:
            fields["exception"] = self.exception.strip().rpartition("\n")[2]
        source = self.source or process
        message = f"{source}: {self.message}" if source else self.message
        return text_line(self.at_s, self.level, self.event, message, fields)

    def as_json(self, process: str) -> str:
        """For log collectors, likewise in one line."""
        at = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"ts": at, "level": self.level, "event": self.event, "message": self.message, **self.fields}
        line |= {"process": process} if process else {}
        return json.dumps(line if self.exception is None else {**line, "exception": self.exception})


def parse_line(text: str) -> ReplicaLine | None:
    """What we logged ourselves: in JSON, or through Ray Serve's own logger. None for all that others say."""
    if (scaling := _SCALING.match(text)) is not None:
        level, at, source, message = scaling.groups()
        at_s = datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        return ReplicaLine(at_s, level, "scaled", message, source=source)
    if not text.startswith("{"):
        return None
    try:
        values = json.loads(text)
        if not str(values.pop("logger")).startswith(_OWN_LOGGERS):
            return None
        at_s = datetime.fromisoformat(values.pop("ts")).timestamp()
        level, event, message = (str(values.pop(name)) for name in ("level", "event", "message"))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    return ReplicaLine(at_s, level, event, message, exception=values.pop("exception", None), fields=values)


def process_of(batch: Mapping[str, Any]) -> str:
    """Who has written these lines. batch: as Ray's log monitor hands it on."""
    name = str(batch.get("actor_name") or batch.get("task_name") or "")
    kind = {"ServeController": "controller", "ProxyActor": "proxy"}.get(name, name.rpartition(":")[2])
    return printable(f"{kind} {batch.get('pid', '')}".strip())
