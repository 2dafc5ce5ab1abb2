"""Grammars are compiled once, for all who wait, and remembered."""

from __future__ import annotations

import asyncio

import pytest

from cluster.grammars.grammar_compiler import CompilerBusy, CompilerUnavailable, TooMuchWork
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.known_grammars import KnownGrammars
from cluster.grammars.source_bounds import SourceRefused
from cluster.monitoring.ingress_metrics import IngressMetrics

pytestmark = pytest.mark.usefixtures("skipped_waits")


class HeldCompiler:
    """Answers when it is let. asked: in the order of the questions. num_cancelled: those given up."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.clients: list[str] = []
        self.num_cancelled = 0
        self.gate = asyncio.Event()
        self.outcomes: dict[str, Exception] = {}

    async def compile(self, source: GrammarSource, client: str) -> str:
        self.asked.append(source.text)
        self.clients.append(client)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if source.text in self.outcomes:
            raise self.outcomes[source.text]
        return f"grammar of {source.text}"


def regex(text: str) -> GrammarSource:
    return GrammarSource("regex", text)


def samples(metrics: IngressMetrics, name: str) -> dict[str, float]:
    (family,) = (family for family in metrics.snapshot() if family["name"] == f"splitserve_{name}")
    return {
        of.get("result") or of["reason"]: value for end, of, value in family["samples"] if end == "_total" and value
    }


@pytest.fixture
def metrics() -> IngressMetrics:
    return IngressMetrics("m", "1", "2")


async def test_those_who_want_the_same_wait_for_one_compilation(metrics: IngressMetrics) -> None:
    compiler = HeldCompiler()
    known = KnownGrammars(compiler, metrics)
    waiting = [asyncio.ensure_future(known.text_of(regex(text))) for text in "aabaa"]
    await asyncio.sleep(0.01)
    assert compiler.asked == ["a", "b"]
    compiler.gate.set()
    assert await asyncio.gather(*waiting) == [f"grammar of {text}" for text in "aabaa"]
    assert await known.text_of(regex("a")) == "grammar of a"
    assert await known.text_of(GrammarSource("grammar", "a")) == "grammar of a"
    assert compiler.asked == ["a", "b", "a"]
    assert samples(metrics, "grammar_checks") == {"new": 6, "known": 1}


async def test_one_client_s_turn_serves_all_who_want_the_same(metrics: IngressMetrics) -> None:
    """Each client has a place of its own in line: nobody waits behind all that another one has sent."""

    class Turns(HeldCompiler):
        async def compile(self, source: GrammarSource, client: str) -> str:
            if client != "b":  # whose turn comes first
                await asyncio.Event().wait()
            return await super().compile(source, client)

    compiler = Turns()
    known = KnownGrammars(compiler, metrics)
    waiting = [asyncio.ensure_future(known.text_of(regex("s"), client)) for client in "aabc"]
    await asyncio.sleep(0.01)
    assert compiler.clients == ["b"]
    compiler.gate.set()
    assert await asyncio.gather(*waiting) == ["grammar of s"] * 4
    assert await known.text_of(regex("s"), "d") == "grammar of s"
    assert compiler.clients == ["b"], "the others' places in line are given up"


async def test_a_client_who_leaves_gives_up_its_place_only(metrics: IngressMetrics) -> None:
    compiler = HeldCompiler()
    known = KnownGrammars(compiler, metrics)
    first, second = (asyncio.ensure_future(known.text_of(regex("s"), client)) for client in "ab")
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert compiler.num_cancelled == 1
    compiler.gate.set()
    assert await second == "grammar of s"


async def test_who_waits_hears_of_a_bug(metrics: IngressMetrics) -> None:
    compiler = HeldCompiler()
    compiler.gate.set()
    compiler.outcomes = {"s": AssertionError("a bug")}
    known = KnownGrammars(compiler, metrics)
    for outcome in await asyncio.gather(*(known.text_of(regex("s"), c) for c in "ab"), return_exceptions=True):
        assert isinstance(outcome, AssertionError)


async def test_it_goes_on_while_anybody_waits_and_no_longer(metrics: IngressMetrics) -> None:
    compiler = HeldCompiler()
    known = KnownGrammars(compiler, metrics)
    first, second = (asyncio.ensure_future(known.text_of(regex("a"))) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert compiler.num_cancelled == 0
    second.cancel()
    # Somebody else comes before the compiler has noticed.
    third = asyncio.ensure_future(known.text_of(regex("a")))
    await asyncio.sleep(0.01)
    assert (compiler.num_cancelled, compiler.asked) == (1, ["a", "a"])
    compiler.gate.set()
    assert await third == "grammar of a"
    assert first.cancelled()
    assert second.cancelled()


async def test_nobody_waits_for_ever(
    metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = HeldCompiler()
    known = KnownGrammars(compiler, metrics)
    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr("cluster.grammars.known_grammars._LONGEST_WAIT_S", 0.01)
        with pytest.raises(CompilerBusy):
            await known.text_of(regex("a"))
    assert [record.event for record in caplog.records] == ["grammar_waited_too_long"]
    await asyncio.sleep(0.01)
    assert compiler.num_cancelled == 1
    assert samples(metrics, "grammar_refusals") == {"waited_too_long": 1}
    compiler.gate.set()
    assert await known.text_of(regex("a")) == "grammar of a"


async def test_refusals_are_remembered_and_failures_are_not(metrics: IngressMetrics) -> None:
    compiler = HeldCompiler()
    compiler.gate.set()
    known = KnownGrammars(compiler, metrics)
    compiler.outcomes = {"a": SourceRefused("is wrong"), "b": TooMuchWork(), "c": CompilerUnavailable("x")}
    for _ in range(2):
        for text, reason in (("a", "is wrong"), ("b", "work")):
            with pytest.raises(SourceRefused, match=reason):
                await known.text_of(regex(text))
        with pytest.raises(CompilerUnavailable):
            await known.text_of(regex("c"))
    assert compiler.asked == ["a", "b", "c", "c"]
    assert samples(metrics, "grammar_refusals") == {"refused": 2, "too_much_work": 2, "unavailable": 2}
    del compiler.outcomes["c"]
    assert await known.text_of(regex("c")) == "grammar of c"


async def test_memory_is_bounded_by_number_and_by_size(metrics: IngressMetrics) -> None:
    compiler = HeldCompiler()
    compiler.gate.set()
    known = KnownGrammars(compiler, metrics)
    for i in range(4_097):
        await known.text_of(regex(str(i)))
        await known.text_of(regex("1"))
    compiler.asked.clear()
    await known.text_of(regex("0"))
    await known.text_of(regex("1"))
    assert compiler.asked == ["0"]
    for i in range(300):
        await known.text_of(regex(f"{i} " + "x" * 60_000))
    compiler.asked.clear()
    await known.text_of(regex("1"))
    assert compiler.asked == ["1"]
