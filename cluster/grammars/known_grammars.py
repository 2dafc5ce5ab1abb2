"""Grammars that clients have asked for: compiled once, remembered, and refused likewise."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from cluster.grammars.grammar_compiler import CompilerBusy, CompilerUnavailable, TooMuchWork
from cluster.grammars.source_bounds import SourceRefused
from cluster.routing.detached_tasks import retrieve, start_detached

if TYPE_CHECKING:
    from cluster.grammars.grammar_source import GrammarSource
    from cluster.monitoring.ingress_metrics import IngressMetrics

logger = logging.getLogger(__name__)

_MOST_KNOWN = 4_096
_MOST_KNOWN_CHARS = 16 * 1024**2
_LONGEST_WAIT_S = 30.0


class Compiler(Protocol):
    async def compile(self, source: GrammarSource, client: str) -> str: ...


_Verdict: TypeAlias = "str | SourceRefused | CompilerUnavailable"


@dataclass(slots=True)
class _UnderWay:
    """A source that is being compiled. A task of each client who wants it waits for that client's turn; the first that
    has one compiles it for all."""

    verdict: asyncio.Future[_Verdict]
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    num_waiting: Counter[str] = field(default_factory=Counter)


class KnownGrammars:
    """One per ingress replica, on its event loop. The least recently used are forgotten."""

    def __init__(self, compiler: Compiler, metrics: IngressMetrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self._known: OrderedDict[GrammarSource, str | SourceRefused] = OrderedDict()
        self._num_chars = 0
        self._under_way: dict[GrammarSource, _UnderWay] = {}

    async def text_of(self, source: GrammarSource, client: str = "") -> str:
        """The text of its Grammar: at once if it is known, else when it has been compiled, which others who want the
        same wait for too. client: an opaque label, by which clients share the compiler fairly. Raises SourceRefused,
        and CompilerUnavailable.
        """
        verdict: _Verdict | None = self._known.get(source)
        self._metrics.grammar_checks.add(result="new" if verdict is None else "known")
        if verdict is not None:
            self._known.move_to_end(source)
        else:
            verdict = await self._compiled(source, client)
        if isinstance(verdict, str):
            return verdict
        self._metrics.grammar_refusals.add(reason=_reason_of(verdict))
        if isinstance(verdict, SourceRefused):
            raise SourceRefused(verdict.reason)
        raise type(verdict)(str(verdict))

    async def _compiled(self, source: GrammarSource, client: str) -> _Verdict:
        """Goes on while anybody waits for it."""
        under_way = self._under_way.get(source)
        if under_way is None:
            under_way = self._under_way[source] = _UnderWay(asyncio.get_running_loop().create_future())
            under_way.verdict.add_done_callback(retrieve)
        if client not in under_way.tasks:
            under_way.tasks[client] = start_detached(self._compile(source, client, under_way))
        under_way.num_waiting[client] += 1
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                return await asyncio.shield(under_way.verdict)
        except TimeoutError:
            extra = {"event": "grammar_waited_too_long", "kind": source.kind, "num_others": len(self._under_way) - 1}
            logger.warning("a new schema or grammar had no turn to be compiled in %g s", _LONGEST_WAIT_S, extra=extra)
            return CompilerBusy(f"no turn within {_LONGEST_WAIT_S:g} s")
        finally:
            under_way.num_waiting[client] -= 1
            if not under_way.num_waiting[client]:
                under_way.tasks.pop(client).cancel()
            if not under_way.tasks and self._under_way.get(source) is under_way:
                del self._under_way[source]

    async def _compile(self, source: GrammarSource, client: str, under_way: _UnderWay) -> None:
        begun = time.monotonic()
        try:
            verdict: _Verdict = await self._compiler.compile(source, client)
        except (SourceRefused, CompilerUnavailable) as error:
            verdict = error.with_traceback(None)
        except Exception as error:  # a bug: who waits hears of it
            if not under_way.verdict.done():
                under_way.verdict.set_exception(error)
            return
        if under_way.verdict.done():  # another client's turn came at the same time
            return
        under_way.verdict.set_result(verdict)
        if self._under_way.get(source) is under_way:
            del self._under_way[source]
        for other, task in under_way.tasks.items():
            if other != client:
                task.cancel()
        if not isinstance(verdict, CompilerUnavailable):
            self._metrics.grammar_check_time.observe(time.monotonic() - begun)
            self._remember(source, verdict)

    def _remember(self, source: GrammarSource, verdict: str | SourceRefused) -> None:
        self._known[source] = verdict
        self._num_chars += _chars(source, verdict)
        while len(self._known) > _MOST_KNOWN or self._num_chars > _MOST_KNOWN_CHARS:
            self._num_chars -= _chars(*self._known.popitem(last=False))


def _reason_of(verdict: SourceRefused | CompilerUnavailable) -> str:
    """One of GRAMMAR_REFUSALS."""
    if isinstance(verdict, CompilerUnavailable):
        return "waited_too_long" if isinstance(verdict, CompilerBusy) else "unavailable"
    return "too_much_work" if isinstance(verdict, TooMuchWork) else "refused"


def _chars(source: GrammarSource, verdict: str | SourceRefused) -> int:
    return len(source.text) + len(verdict if isinstance(verdict, str) else verdict.reason)
