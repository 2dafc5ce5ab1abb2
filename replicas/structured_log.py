"""One line per event: JSON by default, text for people. Prompt text never goes in by default."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

# Of these events the message says these fields already (None: all): they are for JSON.
_IN_MESSAGE: dict[str, frozenset[str] | None] = {
    "access": frozenset({"method", "path", "status"}),
    "replica_gone": None,
    "start_step": frozenset({"total", "unit"}),
    "throughput": None,
}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """{"ts", "level", "logger", "event", "message", ...extras}"""

    def format(self, record: logging.LogRecord) -> str:
        extras = _extras(record)
        line: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "event": extras.pop("event", record.funcName),
            "message": record.getMessage(),
            **extras,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """12:00:00 INFO message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        extras = _extras(record)
        event = str(extras.pop("event", ""))
        text = text_line(record.created, record.levelname, event, record.getMessage(), extras)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave beside the message. Ray puts fields of its own into every record of its processes."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and key[0] != "_"}


def text_line(at_s: float, level: str, event: str, message: str, fields: Mapping[str, object]) -> str:
    """A line for people; at_s: Unix time. What clients send may be in it: nothing in it ends the line or drives a
    terminal."""
    hidden = _IN_MESSAGE.get(event, frozenset())
    shown = "" if hidden is None else "".join(f" {key}={value}" for key, value in fields.items() if key not in hidden)
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))} {level} {printable(message + shown)}"


def printable(text: str) -> str:
    """Control characters, line ends among them, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def configure_logging(level: str, log_format: str) -> None:
    """Send our packages' log to stderr. Touches no other logger. Idempotent."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for package in ("cluster", "replicas", "scheduler"):
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
