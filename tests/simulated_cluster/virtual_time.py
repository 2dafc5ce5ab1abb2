"""An event loop whose time goes on only when nobody has anything to do, and our modules' clocks set by it.

Everything runs on one thread, in an order that depends on the seed alone: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heappop, heappush
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

START_S = 1000.0
_PACKAGES = ("cluster", "replicas", "scheduler")
_MOST_CALLS_AT_ONCE = 100_000  # while time stands still: more, and something goes round for ever


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


class _Call:
    """As asyncio's TimerHandle, with as little as it takes: a simulation makes thousands of them."""

    __slots__ = ("arguments", "callback", "context", "due_s", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], arguments: tuple[Any, ...], context: Context | None, due_s: float
    ) -> None:
        self.callback, self.arguments, self.due_s, self.is_cancelled = callback, arguments, due_s, False
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.due_s


class _Task(asyncio.Task[Any]):
    """Known by its number: where a set of tasks is gone through, such as a TaskGroup's, addresses must not tell."""

    def __init__(self, number: int, *arguments: Any, **named: Any) -> None:
        self._number = number
        super().__init__(*arguments, **named)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """No sockets, no threads. Who is due at the same moment has his turn in the order of asking. Raises NothingToDo,
    GoesRound."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock, self.time = clock, clock.monotonic  # type: ignore[method-assign]
        self._now: deque[_Call] = deque()
        self._later: list[tuple[float, int, _Call]] = []  # a heap
        self._numbers, self._task_numbers = count(), count()
        self.set_task_factory(self._new_task)

    def _new_task(self, loop: Any, coroutine: Any, **named: Any) -> Any:
        return _Task(next(self._task_numbers), coroutine, loop=loop, **named)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        call = _Call(callback, args, context, self._clock.now_s)
        self._now.append(call)
        return call

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        call = _Call(callback, args, context, when)
        heappush(self._later, (when, next(self._numbers), call))
        return call

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self._clock.now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Until it is stopped: everything that is to be done now, then time passes until the next one is due."""
        now, clock = self._now, self._clock
        num_calls, at_s = 0, clock.now_s
        while not self._stopping:  # type: ignore[attr-defined]
            call = now.popleft() if now else self._next_due()
            if call.is_cancelled:
                continue
            try:
                call.context.run(call.callback, *call.arguments)
            except Exception as error:
                self.call_exception_handler({"message": f"{call.callback} failed", "exception": error})
            if at_s < clock.now_s:
                num_calls, at_s = 0, clock.now_s
            num_calls += 1
            if num_calls > _MOST_CALLS_AT_ONCE:
                raise GoesRound

    def _next_due(self) -> _Call:
        """Time has passed until then."""
        later = self._later
        while later:
            due_s, _, call = heappop(later)
            if not call.is_cancelled:
                if due_s > self._clock.now_s:
                    self._clock.now_s = due_s
                return call
        raise NothingToDo


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
