"""`python -m cluster.grammars.compile_process`: compiles grammars in a process that may be killed.

What compiles is native code that nobody can stop, and its own limits do not bound all that it does. Seen of llguidance
1.9.1: 14 patterns in an allOf take 17 s and 580 MB, and a chain of 3,000 rules overflows the stack, which ends the
process. So a process without threads, which has loaded the tokenizer, forks another one, which compiles one grammar
after the other within bounds of CPU time, memory and stack that the kernel keeps. Where one of them strikes, that
process is gone, the other says so, and forks again, which takes a millisecond. It ends when its input does.

Lines of JSON: the first one is `Settings`, answered by {"unsupported"}: why no grammar can be followed with this
tokenizer, or null; then one question at a time, {"id", "seconds", "kind", "text", "is_lenient"}, and its answer, {"id"}
with "text" (of a Grammar), "refused" (why) or "died" (the signal). seconds: of CPU time that it may take.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import orjson
from llguidance import LLTokenizer

from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.refusal_words import in_our_words
from cluster.grammars.source_bounds import GrammarBounds, SourceRefused
from cluster.grammars.source_text import grammar_text
from replicas.grammars.compiled_grammar import GrammarRefused, compile_grammar
from replicas.grammars.control_tokens import control_ids, without_control_texts
from replicas.grammars.grammar_fuel import GrammarFuel

# Of what compiles, beyond what it has when it begins.
_MOST_BYTES = 512 * 1024**2
# Half of what the smallest of the threads has that compile and follow the same grammar later: none is to overflow.
_MOST_STACK_BYTES = 1024**2
# A child that has grown by so much makes room for a new one.
_MOST_GROWN_PAGES = 64 * 1024**2 // resource.getpagesize()
_WORN_OUT = 3
_MOST_REASON_CHARS = 500
_ID = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class Settings:
    """tokenizer: the text of a tokenizer.json. eos_token_ids: of those that end an answer those that it knows."""

    tokenizer: str
    eos_token_ids: tuple[int, ...]
    bounds: GrammarBounds
    fuel: GrammarFuel = field(default_factory=GrammarFuel)

    def to_line(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Settings:
        values = orjson.loads(line)
        bounds, fuel = GrammarBounds(**values["bounds"]), GrammarFuel(**values["fuel"])
        return cls(values["tokenizer"], tuple(values["eos_token_ids"]), bounds, fuel)


def main() -> None:
    """Blocks until the input ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what native code prints is no answer
    settings = Settings.of_line(questions.readline())
    try:
        if not settings.eos_token_ids:
            raise ValueError("the model has no token that ends an answer")
        controls = control_ids(settings.tokenizer)
        tokenizer = LLTokenizer(without_control_texts(settings.tokenizer), eos_token=list(settings.eos_token_ids))
    except (ValueError, KeyError, TypeError) as error:  # some are not of the usual form
        answers.write(_line({"unsupported": str(error)}))
        return
    answers.write(_line({"unsupported": None}))
    in_work = mmap.mmap(-1, _ID.size)  # shared with the child: the id of the question that it has begun, or 0
    while True:
        in_work[:] = _ID.pack(0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _answer_all(questions, answers, in_work, tokenizer, settings, controls)
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (question_id,) = _ID.unpack(in_work[:])
        if question_id:
            answers.write(_line({"id": question_id, "died": status}))
        elif status == 0:
            return


def _answer_all(
    questions: BinaryIO,
    answers: BinaryIO,
    in_work: mmap.mmap,
    tokenizer: LLTokenizer,
    settings: Settings,
    controls: Mapping[str, int],
) -> int:
    """The child. controls: ids of control tokens, by their texts.

    What the process shall end with: 0 when there are no more questions.
    """
    num_pages, bounds = _limit_oneself(), settings.bounds
    while line := questions.readline():
        asked = orjson.loads(line)
        in_work[:] = _ID.pack(asked["id"])
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # its signal ends the process
        source = GrammarSource(asked["kind"], asked["text"], asked["is_lenient"])
        answer = _answer(source, tokenizer, bounds, settings.fuel, controls)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_line({"id": asked["id"], **answer}))
        in_work[:] = _ID.pack(0)
        if _resident_pages() > num_pages + _MOST_GROWN_PAGES:
            return _WORN_OUT
    return 0


def _answer(
    source: GrammarSource,
    tokenizer: LLTokenizer,
    bounds: GrammarBounds,
    fuel: GrammarFuel,
    controls: Mapping[str, int],
) -> dict[str, str]:
    try:
        text = grammar_text(source, bounds, controls)
        warnings = compile_grammar(tokenizer, text, fuel).matcher.get_grammar_warnings()
    except SourceRefused as refused:
        return {"refused": refused.reason}
    except GrammarRefused as refused:
        return {"refused": in_our_words(str(refused))}
    except Exception as error:  # of what a client sent: nobody else is concerned
        return {"refused": in_our_words(type(error).__name__)}
    if warnings:  # of what would be left out
        return {"refused": in_our_words("; ".join(warnings)[:_MOST_REASON_CHARS])}
    return {"text": text}


def _limit_oneself() -> int:
    """Bounds that the kernel keeps. Pages of memory that the process has at its beginning."""
    with contextlib.suppress(OSError):  # what native code says as it dies may hold what a client sent: not for the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, _MOST_STACK_BYTES),
        (resource.RLIMIT_AS, _pages(0) * resource.getpagesize() + _MOST_BYTES),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    os.nice(5)  # those who have an answer already go first
    return _resident_pages()


def _resident_pages() -> int:
    return _pages(1)


def _pages(column: int) -> int:
    """0: all that is mapped; 1: what is in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # many times as fast
        return int(file.read().split()[column])


def _line(answer: dict[str, Any]) -> bytes:
    return orjson.dumps(answer) + b"\n"


if __name__ == "__main__":
    main()
