"""Grammars that clients have asked for: compiled once, remembered, and refused likewise."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from cluster.grammars.grammar_compiler import CompilerUnavailable, TooMuchWork
from cluster.grammars.source_bounds import SourceRefused
from cluster.routing.detached_tasks import start_detached

if TYPE_CHECKING:
    from cluster.grammars.grammar_source import GrammarSource
    from cluster.monitoring.ingress_metrics import IngressMetrics

_MOST_KNOWN = 4_096
_MOST_KNOWN_CHARS = 16 * 1024**2
_LONGEST_WAIT_S = 30.0


class Compiler(Protocol):
    async def compile(self, source: GrammarSource) -> str: ...


class KnownGrammars:
    """One per ingress replica, on its event loop. The least recently used are forgotten."""

    def __init__(self, compiler: Compiler, metrics: IngressMetrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self._known: OrderedDict[GrammarSource, str | SourceRefused] = OrderedDict()
        self._num_chars = 0
        self._under_way: dict[GrammarSource, asyncio.Task[str]] = {}
        self._waiting: dict[GrammarSource, int] = {}

    async def text_of(self, source: GrammarSource) -> str:
        """The text of its Grammar: at once if it is known, else when it has been compiled, which others who want the
        same wait for too. Raises SourceRefused, and CompilerUnavailable.
        """
        known = self._known.get(source)
        self._metrics.grammar_checks.add(result="new" if known is None else "known")
        if known is not None:
            self._known.move_to_end(source)
        else:
            known = await self._compiled(source)
        if isinstance(known, SourceRefused):
            self._metrics.grammar_refusals.add(reason="too_much_work" if isinstance(known, TooMuchWork) else "refused")
            raise SourceRefused(known.reason)
        return known

    async def _compiled(self, source: GrammarSource) -> str | SourceRefused:
        """Goes on while anybody waits for it."""
        task = self._under_way.get(source)
        if task is None:
            task = self._under_way[source] = start_detached(self._compile(source))
            self._waiting[source] = 0
        self._waiting[source] += 1
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                return await asyncio.shield(task)
        except (CompilerUnavailable, TimeoutError) as error:
            self._metrics.grammar_refusals.add(reason="unavailable")
            raise CompilerUnavailable(repr(error)) from None
        except SourceRefused as refused:
            return refused
        finally:
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._waiting[source], self._under_way[source]
                task.cancel()

    async def _compile(self, source: GrammarSource) -> str:
        begun = time.monotonic()
        try:
            verdict: str | SourceRefused = await self._compiler.compile(source)
        except SourceRefused as refused:
            verdict = refused.with_traceback(None)
        self._metrics.grammar_check_time.observe(time.monotonic() - begun)
        self._remember(source, verdict)
        if isinstance(verdict, SourceRefused):
            raise verdict
        return verdict

    def _remember(self, source: GrammarSource, verdict: str | SourceRefused) -> None:
        self._known[source] = verdict
        self._num_chars += _chars(source, verdict)
        while len(self._known) > _MOST_KNOWN or self._num_chars > _MOST_KNOWN_CHARS:
            self._num_chars -= _chars(*self._known.popitem(last=False))


def _chars(source: GrammarSource, verdict: str | SourceRefused) -> int:
    return len(source.text) + len(verdict if isinstance(verdict, str) else verdict.reason)
