"""A line of a replica's log: what it says, and whether it is for the terminal. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from replicas.structured_log import printable, text_line

# Of what is no warning: what somebody who looks on wants to know.
_SHOWN = frozenset({"access", "throughput", "scaled", "replica_ready", "replica_gone", "replica_recovered"})
_ALARMING = frozenset({"WARNING", "ERROR", "CRITICAL"})
_OWN_LOGGERS = ("cluster.", "replicas.", "scheduler.")
# What Ray Serve says of a record beside what we gave it.
_SERVES = frozenset(
    {"asctime", "levelname", "message", "filename", "lineno", "process", "timestamp_ns", "job_id", "worker_id"}
    | {"node_id", "actor_id", "actor_name", "task_id", "task_name", "task_func_name", "exc_text"}
    | {"component_name", "component_id", "component_type", "application", "deployment", "replica", "request_id"}
)


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """What one of our processes has logged. at_s: Unix time. is_ours: by our code, not by Ray Serve's there."""

    at_s: float
    level: str
    event: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    exception: str | None = None
    is_ours: bool = True

    @property
    def is_for_the_terminal(self) -> bool:
        return self.is_ours and (self.level in _ALARMING or self.event in _SHOWN)

    def as_text(self, source: str) -> str:
        """For people; source: who says it. In one line: of an exception, its last one."""
        fields = dict(self.fields)
        if self.exception is not None:
            fields["exception"] = self.exception.strip().rpartition("\n")[2]
        message = f"{source}: {self.message}" if source else self.message
        return text_line(self.at_s, self.level, self.event, message, fields)

    def as_json(self, source: str) -> str:
        """For log collectors, likewise in one line."""
        at = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"ts": at, "level": self.level, "event": self.event, "message": self.message, **self.fields}
        line |= {"source": source} if source else {}
        return json.dumps(line if self.exception is None else {**line, "exception": self.exception})


def parse_line(text: str) -> ReplicaLine | None:
    """What was logged in JSON by us, directly or through Ray Serve's own logger, or by Serve; None for all else."""
    if not text.startswith("{"):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    try:
        return _ours(values) if "logger" in values else _through_serve(values)
    except (KeyError, ValueError, TypeError):
        return None


def _ours(values: dict[str, Any]) -> ReplicaLine | None:
    if not str(values.pop("logger")).startswith(_OWN_LOGGERS):
        return None
    at_s = datetime.fromisoformat(values.pop("ts")).timestamp()
    level, event, message = (str(values.pop(name)) for name in ("level", "event", "message"))
    return ReplicaLine(at_s, level, event, message, exception=values.pop("exception", None), fields=values)


def _through_serve(values: dict[str, Any]) -> ReplicaLine:
    """Serve's own, or of our autoscaling policy in Serve's controller: that names an event."""
    at_s = datetime.strptime(values["asctime"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    fields = {name: value for name, value in values.items() if name not in _SERVES and name != "event"}
    level, event, message, exception = (values.get(key) for key in ("levelname", "event", "message", "exc_text"))
    return ReplicaLine(at_s, str(level), str(event or "serve"), str(message), fields, exception, event is not None)


def source_of(batch: Mapping[str, Any]) -> str:
    """Who has written these lines. batch: as Ray's log monitor hands it on."""
    name = str(batch.get("actor_name") or batch.get("task_name") or "")
    kind = {"ServeController": "controller", "ProxyActor": "proxy"}.get(name, name.rpartition(":")[2])
    return printable(f"{kind} {batch.get('pid', '')}".strip())
