"""An import that may not touch the logging of the process it happens in.

`logging.config.dictConfig`, which NIXL calls when it is imported, first closes every handler of the process, whosever
it is. Ray Serve's own loses the file it writes to then; when Serve's controller is replaced, the new one asks each
replica for the name of that file, gets an error, and stops the replica.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@contextmanager
def kept_logging() -> Iterator[None]:
    """What happens inside closes none of the handlers that there are, and changes no logger that there is.

    Loggers and handlers that are made inside stay. Other threads may log meanwhile. What they change of a logger
    meanwhile is undone, too; so let it be short.
    """
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    loggers = [_LoggerState.of(logger) for logger in (logging.root, *named)]
    module = _ModuleState.of_now()
    handlers = _HiddenHandlers()
    handlers.hide()
    try:
        yield
    finally:
        handlers.show()
        for logger in loggers:
            logger.restore()
        module.restore()


@dataclass(frozen=True, slots=True)
class _LoggerState:
    logger: logging.Logger
    level: int
    disabled: bool
    propagate: bool
    handlers: tuple[logging.Handler, ...]
    filters: tuple[Any, ...]

    @classmethod
    def of(cls, logger: logging.Logger) -> _LoggerState:
        handlers, filters = tuple(logger.handlers), tuple(logger.filters)
        return cls(logger, logger.level, logger.disabled, logger.propagate, handlers, filters)

    def restore(self) -> None:
        logger = self.logger
        logger.setLevel(self.level)
        logger.disabled, logger.propagate = self.disabled, self.propagate
        logger.handlers[:], logger.filters[:] = self.handlers, self.filters


@dataclass(frozen=True, slots=True)
class _ModuleState:
    """What holds for all loggers. NIXL has errors of handlers go unsaid (`raiseExceptions`)."""

    disabled_level: int
    raise_exceptions: bool
    logger_class: type[logging.Logger]
    record_factory: Any

    @classmethod
    def of_now(cls) -> _ModuleState:
        disabled_level = logging.root.manager.disable
        return cls(disabled_level, logging.raiseExceptions, logging.getLoggerClass(), logging.getLogRecordFactory())

    def restore(self) -> None:
        logging.disable(self.disabled_level)
        logging.raiseExceptions = self.raise_exceptions
        logging.setLoggerClass(self.logger_class)
        logging.setLogRecordFactory(self.record_factory)


class _HiddenHandlers:
    """The process's handlers, off the two tables by which `logging` finds whom to close. Loggers use them as ever.

    The tables are `logging`'s own, without a public name. Both are changed in place: its `shutdown` at the end of the
    process holds on to one of them.
    """

    def __init__(self) -> None:
        self._references: list[Any] = []
        self._by_name: dict[str, logging.Handler] = {}

    def hide(self) -> None:
        with logging._lock:  # type: ignore[attr-defined]
            self._references = list(logging._handlerList)  # type: ignore[attr-defined]
            self._by_name = dict(logging._handlers)  # type: ignore[attr-defined]
            logging._handlerList.clear()  # type: ignore[attr-defined]
            logging._handlers.clear()  # type: ignore[attr-defined]

    def show(self) -> None:
        """Before those that were made meanwhile: they are closed from the end, the newest first."""
        with logging._lock:  # type: ignore[attr-defined]
            alive = [reference for reference in self._references if reference() is not None]
            logging._handlerList[:0] = alive  # type: ignore[attr-defined]
            logging._handlers.update(self._by_name)  # type: ignore[attr-defined]
