"""An event loop whose time goes on only when nobody has anything to do, and our modules' clocks set by it.

Everything runs on one thread, in an order that depends on the seed alone: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

START_S = 1000.0
_PACKAGES = ("cluster", "replicas", "scheduler")
MOST_TURNS_AT_ONCE = 100_000  # of the loop, while time stands still: more, and something goes round for ever


class NothingToDo(Exception):
    """Somebody waits for what will never happen."""


class GoesRound(Exception):
    """The loop is busy for ever at one moment."""


class VirtualClock:
    """Stands for the module `time` where our code asks for the monotonic time; its other names are the real ones."""

    def __init__(self, now_s: float = START_S) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody may block the one thread of a simulation")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Names:
    """Stands for the module `uuid`: names by number."""

    def __init__(self) -> None:
        self.count = 0

    def uuid4(self) -> SimpleNamespace:
        self.count += 1
        return SimpleNamespace(hex=f"{self.count:04d}")


class VirtualLoop(asyncio.BaseEventLoop):
    """No sockets, no threads. Raises NothingToDo, GoesRound."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock, self._num_turns = clock, 0
        self._selector = self

    def time(self) -> float:
        return self._clock.now_s

    def select(self, timeout_s: float | None) -> list[Any]:
        """What a selector does: here time passes instead."""
        if timeout_s is None:
            raise NothingToDo
        if timeout_s > 0.0:
            self._clock.now_s += timeout_s
            self._num_turns = 0
        else:
            self._num_turns += 1
            if self._num_turns > MOST_TURNS_AT_ONCE:
                raise GoesRound
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Stage:
    """Where simulations run, one after another."""

    def __init__(self, clock: VirtualClock, names: _Names) -> None:
        self.clock, self._names = clock, names

    def run(self, make: Callable[[], Any]) -> Any:
        """Run what it makes, from the first moment on. Raises what that raises, NothingToDo and GoesRound."""
        self.clock.now_s = START_S
        self._names.count = 0
        loop = VirtualLoop(self.clock)
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(make())
        finally:
            _end_tasks(loop)
            asyncio.set_event_loop(None)
            loop.close()


@contextmanager
def virtual_time() -> Iterator[Stage]:
    """Clocks and random names of all our modules that are imported by now are the simulation's until the end."""
    clock, names = VirtualClock(), _Names()
    with stood_in(_PACKAGES, clock, ((uuid, names),)):
        yield Stage(clock, names)


@contextmanager
def stood_in(
    packages: Collection[str], clock: VirtualClock, others: Collection[tuple[ModuleType, Any]] = ()
) -> Iterator[None]:
    """This clock is the module `time` of all modules in these packages that are imported by now, until the end; also
    where a function has the real one as an argument's default. others: more modules, and what stands for each.
    """
    undo: list[Callable[[], None]] = []
    inside = tuple(f"{package}." for package in packages)
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(inside)]
    for module in modules:
        for real, stand_in in ((time, clock), *others):
            if vars(module).get(real.__name__) is real:
                patched = patch.object(module, real.__name__, stand_in)
                patched.start()
                undo.append(patched.stop)
        undo += [_with_defaults(function, clock) for function in _functions(module) if _has_clock(function)]
    try:
        yield
    finally:
        for one in reversed(undo):
            one()


def _end_tasks(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())


def _functions(module: ModuleType) -> Iterator[Any]:
    """Those that are defined there, and the methods of its classes."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type):
            yield from (method for method in vars(value).values() if hasattr(method, "__kwdefaults__"))
        elif hasattr(value, "__kwdefaults__"):
            yield value


def _has_clock(function: Any) -> bool:
    """Whether the clock is an argument's default: bound when it was defined."""
    return time.monotonic in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _with_defaults(function: Any, clock: VirtualClock) -> Callable[[], None]:
    """Mutates; what it returns undoes it."""
    before = function.__defaults__, function.__kwdefaults__

    def virtual(value: Any) -> Any:
        return clock.monotonic if value is time.monotonic else value

    function.__defaults__ = tuple(map(virtual, before[0])) if before[0] else before[0]
    if before[1]:
        function.__kwdefaults__ = {name: virtual(value) for name, value in before[1].items()}

    def undo() -> None:
        function.__defaults__, function.__kwdefaults__ = before

    return undo
