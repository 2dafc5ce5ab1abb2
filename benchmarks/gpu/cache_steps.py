"""What the prefix cache of a bare engine brings and costs: one prompt again and again, and prompts that share nothing.

Three engines over one runner take turns, one with a cache and two without: what drifts on the machine is in all, and
how far the two are apart says how small a difference can be seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.gpu.bare_engine import BareEngine, TimedTokens, steady_step_ms
from scheduler.prefix_book import PrefixOptions
from scheduler.recent_keys import RecentKeys
from scheduler.sampling_params import SamplingParams

_GREEDY = SamplingParams(0.0)


def with_cache() -> PrefixOptions:
    """As a replica's, which tells routers what it has."""
    return PrefixOptions("benchmark", on_piece=RecentKeys("benchmark").append)


@dataclass(frozen=True, slots=True)
class Loads:
    """rows: of decode steps. num_in, num_out: tokens of each. prompts: so many, of so many tokens, for prefill."""

    rows: tuple[int, ...] = (64, 16)
    num_in: int = 1009
    num_out: int = 128
    prompts: tuple[int, int] = (16, 2048)
    num_repeated_in: int = 8192
    num_rounds: int = 3


class CacheSteps:
    """Of an engine with a cache and two beside it without; all of them run."""

    def __init__(self, cached: BareEngine, plain: tuple[BareEngine, BareEngine], loads: Loads, top_id: int) -> None:
        """top_id: prompts are random ids below it."""
        self._engines = {"on": cached, "off": plain[0], "again": plain[1]}
        self._loads, self._top_id = loads, top_id
        self._rng = random.Random(7)

    def repeated(self, num_warm: int) -> dict[str, float | list[float]]:
        """Ms from the call to the first token's leaving the engine, of a prompt that is new and of the same again.
        Blocks. Raises RuntimeError if it was not found."""
        engine, length = self._engines["on"], self._loads.num_repeated_in
        self._first_token_ms(engine, self._prompt(length))
        prompt = self._prompt(length)
        cold_ms = self._first_token_ms(engine, prompt)
        before = self._num_found()
        warm_ms = [round(self._first_token_ms(engine, prompt), 3) for _ in range(num_warm)]
        block_size = engine.runner.pool.layout.block_size
        expected = num_warm * ((length - 1) // block_size) * block_size
        if (found := self._num_found() - before) != expected:
            raise RuntimeError(f"{found} tokens of repeated prompts were found instead of {expected}")
        return {"cold_ms": round(cold_ms, 3), "warm_ms": round(median(warm_ms), 3), "warm_all_ms": warm_ms}

    def nothing_shared(self) -> dict[str, float | list[float]]:
        """Each figure with the cache on and off, medians of rounds; what it is more by with it, in percent; and how far
        the two without are apart, in percent. Blocks. Raises RuntimeError if something was found."""
        for name in self._engines:
            self._figures(
                name, self._loads.rows[:1]
            )  # the cache is full from here on: each new block takes an old one's
        before = self._num_found()
        rounds: list[Mapping[str, Mapping[str, float]]] = []
        names = list(self._engines)
        for number in range(self._loads.num_rounds):
            first = number % len(names)  # each is once the first, as often as rounds allow
            order = names[first:] + names[:first]
            rounds.append({name: self._figures(name, self._loads.rows) for name in order})
        if self._num_found() != before:
            raise RuntimeError("of prompts that share nothing something was found")
        return _compared(rounds)

    def _figures(self, name: str, rows: Sequence[int]) -> dict[str, float]:
        """Of one engine: ms of steps, ms for each request of a batch, ms for a thousand tokens of prompts."""
        loads, found = self._loads, {}
        for batch in rows:
            streams, took_ms = self._run(name, batch, loads.num_in, loads.num_out)
            found[f"step_{batch}"] = steady_step_ms(streams)
            found[f"request_of_{batch}"] = took_ms / batch
        count, length = loads.prompts
        _, took_ms = self._run(name, count, length, 1)
        return found | {"prefill_1000": 1000 * took_ms / (count * length)}

    def _run(self, name: str, count: int, num_in: int, num_out: int) -> tuple[list[TimedTokens], float]:
        prompts = [self._prompt(num_in) for _ in range(count)]
        started_s = time.perf_counter()
        streams = self._engines[name].run(prompts, [num_out] * count, _GREEDY)
        return streams, 1e3 * (time.perf_counter() - started_s)

    def _first_token_ms(self, engine: BareEngine, prompt: list[int]) -> float:
        started_s = time.perf_counter()
        (stream,) = engine.run([prompt], [2], _GREEDY)
        return 1e3 * (stream.times_s[0] - started_s)

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(100, self._top_id) for _ in range(length)]

    def _num_found(self) -> int:
        prefixes = self._engines["on"].scheduler.prefixes
        assert prefixes is not None
        return prefixes.stats().num_found_tokens


def _compared(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, float | list[float]]:
    found: dict[str, float | list[float]] = {}
    for name in rounds[0]["on"]:
        on, off, again = ([times[kind][name] for times in rounds] for kind in ("on", "off", "again"))
        without = [(first + second) / 2 for first, second in zip(off, again, strict=True)]
        more = [100 * (with_it / plain - 1) for with_it, plain in zip(on, without, strict=True)]
        found[f"{name}_on_ms"], found[f"{name}_off_ms"] = round(median(on), 4), round(median(without), 4)
        found[f"{name}_more_percent"] = round(median(more), 3)
        found[f"{name}_more_all_percent"] = [round(percent, 2) for percent in more]
        apart = [100 * abs(second / first - 1) for first, second in zip(off, again, strict=True)]
        found[f"{name}_apart_percent"] = round(median(apart), 3)
    return found
