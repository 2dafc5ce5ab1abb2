"""The process that compiles: what kills it does not kill anybody else, and it is gone when its ingress is."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.grammars.compile_process import Settings
from cluster.grammars.grammar_compiler import CompilerUnavailable, GrammarCompiler, TooMuchWork
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.source_bounds import GrammarBounds, SourceRefused
from tests.cluster.byte_tokenizer import EOS, byte_tokenizer_json
from tests.cluster.hostile_grammars import hostile_sources

BOUNDS = GrammarBounds(32, 500, 64, 1_000, max_grammar_seconds=0.5)
GOOD = GrammarSource("regex", "[a-z]+")
DEEP = GrammarSource("grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3_000)) + '\na3000: "x"')


def settings(seconds: float = 0.5) -> Settings:
    return Settings(byte_tokenizer_json(), (EOS,), GrammarBounds(32, 500, 64, 1_000, seconds))


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(settings())
    yield made
    made.close()


def processes_of(compiler: GrammarCompiler) -> list[int]:
    """The process and what it has forked."""
    assert compiler._running is not None
    first = compiler._running.process.pid
    return [first, *map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went between opening and reading
        return False


async def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 120
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return not any(map(is_there, pids))


async def test_what_overflows_the_stack_is_refused_and_the_next_one_is_compiled(compiler: GrammarCompiler) -> None:
    good = await compiler.compile(GOOD)
    first, child = processes_of(compiler)
    with pytest.raises(TooMuchWork):
        await compiler.compile(DEEP)
    assert await gone(child)
    assert await compiler.compile(GOOD) == good
    assert processes_of(compiler)[0] == first


async def test_time_is_bounded_and_the_loop_goes_on_meanwhile() -> None:
    compiler = GrammarCompiler(settings(0.05))
    patterns = [{"type": "string", "pattern": f".*[ab]{{{i}}}.*"} for i in range(12)]
    long = GrammarSource("json_schema", json.dumps({"allOf": patterns}))  # takes 0.3 s
    try:
        for _ in range(5):  # while the loop stands still with its process it has no turns either
            await compiler.compile(GOOD)
            _, child = processes_of(compiler)
            asked, num_turns = asyncio.ensure_future(compiler.compile(long)), 0
            while not asked.done():
                await asyncio.sleep(0.005)
                num_turns += 1
            with pytest.raises(TooMuchWork):
                await asked
            assert await gone(child)
            assert await compiler.compile(GOOD)
            if num_turns > 3:
                break
        assert num_turns > 3
    finally:
        compiler.close()


def long_source(number: int) -> GrammarSource:
    patterns = [{"type": "string", "pattern": f".*[ab]{{{i}}}.*{number}"} for i in range(12)]
    return GrammarSource("json_schema", json.dumps({"allOf": patterns}))


async def test_who_sends_long_ones_does_not_hold_up_the_others(compiler: GrammarCompiler) -> None:
    await compiler.start()
    long = [asyncio.ensure_future(compiler.compile(long_source(i))) for i in range(8)]
    await asyncio.sleep(0)
    for i in range(3):
        assert await compiler.compile(GrammarSource("regex", f"[a-z]+{i}"))
        assert sum(asked.done() for asked in long) <= i + 1  # the one that was at work
    for asked in asyncio.as_completed(long):
        try:
            assert await asked
        except TooMuchWork:
            continue


async def test_who_sends_long_ones_does_not_hold_up_another_s_long_one(compiler: GrammarCompiler) -> None:
    await compiler.start()
    first = [asyncio.ensure_future(compiler.compile(long_source(i), "a")) for i in range(8)]
    await asyncio.sleep(0.1)
    other = asyncio.ensure_future(compiler.compile(long_source(8), "b"))
    await asyncio.wait([other])
    assert sum(asked.done() for asked in first) <= 2  # that one, and one that was at work
    for asked in (*first, other):
        asked.cancel()
    await asyncio.wait([*first, other])


async def test_the_kernel_bounds_memory_and_stack(compiler: GrammarCompiler) -> None:
    await compiler.compile(GOOD)
    _, child = processes_of(compiler)
    assert resource.prlimit(child, resource.RLIMIT_STACK)[0] == 1024**2
    assert resource.prlimit(child, resource.RLIMIT_CORE)[0] == 0
    mapped = int(Path(f"/proc/{child}/statm").read_text().split()[0]) * resource.getpagesize()
    assert mapped < resource.prlimit(child, resource.RLIMIT_AS)[0] < mapped + 600 * 1024**2


async def test_it_starts_again_where_somebody_has_killed_it(compiler: GrammarCompiler) -> None:
    good = await compiler.compile(GOOD)
    first, child = processes_of(compiler)
    os.kill(child, signal.SIGKILL)  # between two questions
    assert await gone(child)
    assert await compiler.compile(GOOD) == good
    assert processes_of(compiler)[0] == first
    os.killpg(first, signal.SIGKILL)
    assert await gone(first)
    assert await compiler.compile(GOOD) == good
    assert processes_of(compiler)[0] != first


async def test_one_that_does_not_answer_is_given_up(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    good = await compiler.compile(GOOD)
    pids = processes_of(compiler)
    monkeypatch.setattr("cluster.grammars.grammar_compiler._ANSWER_TIMEOUT_S", 0.0)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(CompilerUnavailable):
        await compiler.compile(GOOD)
    assert await gone(*pids)
    monkeypatch.undo()
    assert await compiler.compile(GOOD) == good


async def test_one_that_does_not_read_is_given_up(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question may be larger than what the kernel takes for somebody who does not read."""
    good = await compiler.compile(GOOD)
    pids = processes_of(compiler)
    monkeypatch.setattr("cluster.grammars.grammar_compiler._ANSWER_TIMEOUT_S", 0.0)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(CompilerUnavailable):
        async with asyncio.timeout(120):
            await compiler.compile(GrammarSource("text", "x" * 1_000_000))
    assert await gone(*pids)
    monkeypatch.undo()
    assert await compiler.compile(GOOD) == good
    with pytest.raises(SourceRefused):
        await compiler.compile(GrammarSource("text", "x" * 1_000_000))


async def test_closing_ends_it(compiler: GrammarCompiler) -> None:
    await compiler.compile(GOOD)
    pids = processes_of(compiler)
    assert len(pids) == 2
    compiler.close()
    assert await gone(*pids)


async def test_it_ends_with_its_ingress_however_that_ends() -> None:
    program = (
        "import asyncio, os, sys\n"
        "from cluster.grammars.grammar_compiler import GrammarCompiler\n"
        "from tests.cluster.test_grammar_compiler import GOOD, processes_of, settings\n"
        "compiler = GrammarCompiler(settings())\n"
        "asyncio.run(compiler.compile(GOOD))\n"
        "print(*processes_of(compiler), flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ingress = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=Path.cwd()
    )
    assert ingress.stdout is not None
    pids = [int(pid) for pid in ingress.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_there, pids))
    ingress.kill()
    ingress.wait()
    assert await gone(*pids)
    for pipe in (ingress.stdin, ingress.stdout):
        assert pipe is not None
        pipe.close()


async def test_a_tokenizer_that_no_grammar_can_be_made_for_is_said_once() -> None:
    spec = json.loads(byte_tokenizer_json())
    spec["decoder"] = None
    spec["model"] = {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 256}, "unk_token": "a"}
    for settings_ in (Settings(json.dumps(spec), (EOS,), BOUNDS), Settings(byte_tokenizer_json(), (), BOUNDS)):
        compiler = GrammarCompiler(settings_)
        try:
            for _ in range(2):
                with pytest.raises(SourceRefused, match="tokenizer of this model"):
                    await compiler.compile(GOOD)
        finally:
            compiler.close()


async def outcome_of(compiler: GrammarCompiler, source: GrammarSource) -> tuple[str, str]:
    """And why it is refused."""
    try:
        assert await compiler.compile(source)
    except TooMuchWork:
        return "too much", ""
    except SourceRefused as refused:
        return "refused", refused.reason
    return "compiled", ""


@pytest.mark.slow
async def test_300_hostile_ones_are_refused_or_compiled_and_leave_nothing(compiler: GrammarCompiler) -> None:
    """Each within its CPU time, which the kernel sees to: what takes longer than the bound dies of it."""
    assert await compiler.compile(GOOD)
    (first, _), outcomes = processes_of(compiler), {"compiled": 0, "refused": 0, "too much": 0}
    before, reasons = _resident_kb(first), list[str]()
    for name, source in hostile_sources():
        took_s = list[float]()
        for _ in range(3):  # a machine that stands still does so once
            begun = time.monotonic()
            outcome, reason = await outcome_of(compiler, source)
            took_s.append(time.monotonic() - begun)
            if took_s[-1] < 30:
                break
        assert took_s[-1] < 30, (name, took_s)
        outcomes[outcome] += 1
        reasons += [reason] * bool(reason)
    assert sum(outcomes.values()) > 300
    assert all(0 < len(reason) < 700 for reason in reasons)
    assert min(outcomes.values()) > 10, outcomes
    assert await compiler.compile(GOOD)  # behind one that died there may be no child yet
    pid, child = processes_of(compiler)
    assert pid == first
    assert _resident_kb(first) < before + 20_000
    assert _resident_kb(child) < before + 100_000


def _resident_kb(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])
