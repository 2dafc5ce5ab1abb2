"""Compiled grammars by their texts, the last used ones, and the threads that compile the others."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from llguidance import LLTokenizer

from replicas.grammars.choice_texts import ChoiceTexts
from replicas.grammars.compiled_grammar import CompiledGrammar, GrammarRefused, compile_grammar
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.learned import most_bytes
from scheduler.grammar import Grammar

logger = logging.getLogger(__name__)

# What a refusal takes beside its text: the reason.
_REFUSAL_BYTES = 2_000
# A grammar that so many texts have begun to follow gets a twin more.
_TEXTS_A_TWIN = 4


@dataclass(slots=True)
class CacheCounts:
    """Since the start. refused: texts that were not compiled. compile_s: seconds of all that were tried. worn_out: how
    often what texts of one grammar had learned together was too much to keep."""

    hits: int = 0
    misses: int = 0
    refused: int = 0
    compile_s: float = 0.0
    worn_out: int = 0


@dataclass(slots=True)
class _Kept:
    future: Future[CompiledGrammar] = field(default_factory=Future)
    grammar: CompiledGrammar | None = None  # that it will have, if it is not refused
    num_bytes: int = 0
    num_asked: int = 1
    num_twins: int = 1  # that it has or will have


class GrammarCache:
    """Any thread. A refusal is kept as well: who sends a bad schema sends it again.

    What is kept counts as much as it takes at most, which grows with what its texts learn. Texts under way keep theirs
    when it is forgotten.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        fuel: GrammarFuel,
        *,
        num_threads: int,
        max_entries: int,
        max_bytes: int,
        compiled: Callable[[float], None] = lambda duration_s: None,
    ) -> None:
        """num_threads: that compile; a grammar has as many twins at most. compiled: told how long each text took, on a
        thread of the cache."""
        self.tokenizer = tokenizer
        self.fuel = fuel
        self.counts = CacheCounts()
        self._num_threads = num_threads
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammars")
        self._compiled = compiled

    def get(self, text: str) -> Future[CompiledGrammar]:
        """Done at once if it is known, else when it is compiled; ends in GrammarRefused for a text that is refused.
        Does not block. Nobody may cancel it: others wait for the same."""
        with self._lock:
            if (known := self._kept.get(text)) is not None:
                self.counts.hits += 1
                self._kept.move_to_end(text)
                known.num_asked += 1
                if known.future.done() and known.future.exception() is None and self._wants_twin(known):
                    self._threads.submit(self._add_twins, text, known, known.future.result())
                return known.future
            self.counts.misses += 1
            kept = self._kept[text] = _Kept()
            self._counts_as(text, kept, most_bytes(len(text), 0, 0))
        self._threads.submit(self._compile, text, kept)
        return kept.future

    def begin(self, grammar: Grammar, begun_ids: Sequence[int]) -> Future[ChoiceTexts]:
        """The texts of a request, as `get`. begun_ids: output that its prompt ends with, of a replay: thousands of
        tokens take a while, and take it here."""
        texts: Future[ChoiceTexts] = Future()
        compiled = self.get(grammar.text)
        if begun_ids:
            compiled.add_done_callback(lambda done: self._threads.submit(_begin, texts, grammar, done, begun_ids))
        else:
            compiled.add_done_callback(lambda done: _begin(texts, grammar, done, begun_ids))
        return texts

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept, at most."""
        return self._num_bytes

    def close(self) -> None:
        """Does not wait. What waits to be compiled is not, and nobody hears of it."""
        with self._lock:
            self._num_threads = 0
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _counts_as(self, text: str, kept: _Kept, num_bytes: int) -> None:
        """What is kept of the text takes so much by now: others are forgotten for it, the longest unused first, until
        the rest is within the bounds; the newest stays. Under the lock. Mutates."""
        if self._kept.get(text) is not kept:
            return
        self._num_bytes += num_bytes - kept.num_bytes
        kept.num_bytes = num_bytes
        while len(self._kept) > 1 and (len(self._kept) > self._max_entries or self._num_bytes > self._max_bytes):
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _count(self, text: str, grammar: CompiledGrammar) -> None:
        """It is new, its texts have learned more, or it has other twins. Mutates."""
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None and kept.grammar is grammar:
                self._counts_as(text, kept, grammar.num_bytes + self.tokenizer.vocab_size // 8)

    def _compile(self, text: str, kept: _Kept) -> None:
        started_s = time.monotonic()
        grammar: CompiledGrammar | None = None
        error: Exception | None = None
        try:
            grammar = compile_grammar(self.tokenizer, text, self.fuel)
        except GrammarRefused as refused:
            error = refused.with_traceback(None)  # it would keep what was compiled, for as long as the refusal is kept
        except Exception as failed:  # who waits must hear of it, whatever it is
            error = failed
        duration_s = time.monotonic() - started_s
        with self._lock:
            self.counts.compile_s += duration_s
            if isinstance(error, GrammarRefused):
                self.counts.refused += 1
                self._counts_as(text, kept, len(text) + _REFUSAL_BYTES)
            elif error is not None and self._kept.get(text) is kept:
                self._num_bytes -= self._kept.pop(text).num_bytes  # no fault of the text
        self._compiled(duration_s)
        if grammar is None:
            kept.future.set_exception(error)
        else:
            grammar.tell_worn_out = self._count_worn_out
            kept.grammar, grammar.tell_grown = grammar, partial(self._count, text)
            self._count(text, grammar)
            self._add_twins(text, kept, grammar)  # those who wait for it begin all at once
            kept.future.set_result(grammar)

    def _count_worn_out(self) -> None:
        with self._lock:
            self.counts.worn_out += 1

    def _wants_twin(self, kept: _Kept) -> bool:
        return kept.num_twins < min(self._num_threads, 1 + kept.num_asked // _TEXTS_A_TWIN)

    def _add_twins(self, text: str, kept: _Kept, grammar: CompiledGrammar) -> None:
        """As many as it wants by now. On a thread of the cache. Raises nothing: without them texts only wait longer."""
        try:
            while True:
                with self._lock:
                    if not self._wants_twin(kept):
                        return
                    kept.num_twins += 1
                grammar.add_twin()
                self._count(text, grammar)
        except Exception:
            logger.warning("a grammar has one twin less", exc_info=True, extra={"event": "grammar_twin_failed"})


def _begin(
    texts: Future[ChoiceTexts], grammar: Grammar, compiled: Future[CompiledGrammar], begun_ids: Sequence[int]
) -> None:
    if (error := compiled.exception()) is not None:
        texts.set_exception(error)
    else:
        texts.set_result(ChoiceTexts(grammar, compiled.result(), begun_ids))
