"""Asks a process of its own (`cluster.grammars.compile_process`) whether a grammar can be followed."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import orjson

from cluster.grammars.compile_process import Settings
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.refusal_words import TOO_MUCH_WORK
from cluster.grammars.source_bounds import SourceRefused
from cluster.grammars.waiting_turns import WaitingTurns

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
# Until an answer, beyond the CPU time that one may take: a machine may have much else to do.
_ANSWER_TIMEOUT_S = 30.0
_PIECE_BYTES = 65_536
# CPU time of a first try, which nearly all grammars need a tenth of. What takes longer waits until nobody does who may
# be quick: clients who send nothing but long ones are not to hold up the others.
_FIRST_TRY_S = 0.02


class CompilerUnavailable(Exception):
    """The process can't be started, or does not answer. Another try may succeed."""


class CompilerBusy(CompilerUnavailable):
    """The turn did not come in time."""


class TooMuchWork(SourceRefused):
    """It took more time, memory or stack than one may take."""

    def __init__(self) -> None:
        super().__init__(TOO_MUCH_WORK)


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    answers: IO[bytes]
    questions: IO[bytes]
    rest: bytes = b""
    last_id: int = 0


class GrammarCompiler:
    """One per ingress replica: one process, one grammar at a time, short ones first, clients in turns. It starts with
    the first, or by `start`, and again where it has died. The process ends with this one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._line = ThreadPoolExecutor(1, "grammars")
        self._turns = WaitingTurns()
        # Only in that thread:
        self._running: _Running | None = None
        self._unsupported: str | None = None

    async def start(self) -> None:
        """Loads the tokenizer, which takes about a second. Raises CompilerUnavailable."""
        await self._in_line(self._started)

    async def compile(self, source: GrammarSource, client: str = "") -> str:
        """The text of its Grammar. client: a label; clients are served in turns. Raises SourceRefused, and
        CompilerUnavailable."""
        seconds = self._settings.bounds.max_grammar_seconds
        first_s = min(_FIRST_TRY_S, seconds)
        async with self._turns.turn(False, client):
            answer = await self._in_line(self._ask, source, first_s)
        if answer.get("died") == -signal.SIGPROF and first_s < seconds:
            async with self._turns.turn(True, client):
                answer = await self._in_line(self._ask, source, seconds)
        if "text" in answer:
            return str(answer["text"])
        if "died" in answer:
            extra = {"event": "grammar_too_much_work", "kind": source.kind, "end": answer["died"]}
            logger.warning("a client's grammar took more work than it may", extra=extra)
        if "died" in answer or answer["refused"] == TOO_MUCH_WORK:
            raise TooMuchWork
        raise SourceRefused(str(answer["refused"]))

    def close(self) -> None:
        """Ends the process, also in the midst of a grammar."""
        self._line.shutdown(wait=False, cancel_futures=True)
        self._stop()

    async def _in_line(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._line, work, *args)

    # -- in the thread -----------------------------------------------------------------------------

    def _ask(self, source: GrammarSource, seconds: float) -> dict[str, Any]:
        running = self._started()
        if self._unsupported is not None:
            return {"refused": "can't be followed with the tokenizer of this model"}
        running.last_id += 1
        question = {"id": running.last_id, "seconds": seconds, **asdict(source)}
        timeout_s = seconds + _ANSWER_TIMEOUT_S
        try:
            _ask(running, orjson.dumps(question) + b"\n", timeout_s)
            answer: dict[str, Any] = {}
            while answer.get("id") != running.last_id:  # of one that died just behind its answer there are two
                answer = _answer(running, timeout_s)
        except (OSError, EOFError, TimeoutError) as error:
            self._stop()
            logger.warning("grammar compiler lost: %r", error, extra={"event": "grammar_compiler_lost"})
            raise CompilerUnavailable(repr(error)) from None
        return answer

    def _started(self) -> _Running:
        if self._running is not None and (self._unsupported is not None or self._running.process.poll() is None):
            return self._running
        self._stop()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.grammars.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # one signal ends it and what it has forked
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._running = running = _Running(process, process.stdout, process.stdin)
        try:
            _ask(running, self._settings.to_line(), _START_TIMEOUT_S)
            self._unsupported = _answer(running, _START_TIMEOUT_S)["unsupported"]
        except (OSError, EOFError, TimeoutError) as error:
            self._stop()
            logger.error("grammar compiler does not start: %r", error, extra={"event": "grammar_compiler_lost"})
            raise CompilerUnavailable(repr(error)) from None
        if self._unsupported is not None:
            extra = {"event": "grammars_unsupported", "reason": self._unsupported}
            logger.warning("no grammar can be followed with this tokenizer: %s", self._unsupported, extra=extra)
        return running

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        for pipe in (running.questions, running.answers):
            with suppress(OSError):
                pipe.close()
        running.process.wait()


def _ask(running: _Running, line: bytes, timeout_s: float) -> None:
    """Write a line. Raises TimeoutError where it is not read, as of a process that is stopped, and OSError."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()  # unlike select it takes any file descriptor, and an ingress has many
    poll.register(running.questions, select.POLLOUT)
    rest = memoryview(line)
    while rest:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"nothing is read within {timeout_s:g} s")
        rest = rest[os.write(running.questions.fileno(), rest[:_PIECE_BYTES]) :]


def _answer(running: _Running, timeout_s: float) -> dict[str, Any]:
    """The next line. Raises TimeoutError and EOFError."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(running.answers, select.POLLIN)
    while b"\n" not in running.rest:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        piece = os.read(running.answers.fileno(), _PIECE_BYTES)
        if not piece:
            raise EOFError("it has ended")
        running.rest += piece
    line, _, running.rest = running.rest.partition(b"\n")
    answer: dict[str, Any] = orjson.loads(line)
    return answer
