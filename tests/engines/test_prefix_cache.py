"""Engines with a prefix cache: whatever came before, each text is that of an engine without one.

Float32, a tiny model: up to the order of sums, which differs with what is computed in one piece (test_batch_mates). How
many texts have parted is printed; with this model none does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.routing.generation import Generation
from replicas.settings import EngineSettings
from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams
from scheduler.block_chain import prompt_chain
from scheduler.length_estimator import LengthEstimator
from scheduler.prefix_hash import chain_start
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem, collect
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

BLOCK_SIZE = 16
MAX_MODEL_LEN = 160
OPTIMISTIC = AdmissionPolicy(quantile=0.05, min_samples=1)


def _settings(tiny_goldens: TinyGoldens, pool: str, **changes: Any) -> EngineSettings:
    base = tiny_settings(pool, tiny_goldens.folder, max_batch_tokens=64, **changes)
    return replace(base, model=replace(base.model, max_model_len=MAX_MODEL_LEN))


@contextmanager
def _running(decode: EngineSettings, prefill: EngineSettings | None = None) -> Iterator[LocalSystem]:
    system = LocalSystem(decode, prefill)
    try:
        yield system
        asyncio.run(system.wait_for_baseline())
    finally:
        system.close()


def _found(system: LocalSystem) -> int:
    """Prompt tokens that were found, by all engines."""
    books = [built.engine.scheduler.prefixes for built in system.engines]
    return sum(book.num_found_tokens for book in books if book is not None)


def _evicted(system: LocalSystem) -> int:
    return sum(b.engine.scheduler.prefixes.cache.num_evicted for b in system.engines if b.engine.scheduler.prefixes)


class History:
    """Random requests whose prompts begin as others, or go on from their answers, asked several at a time."""

    def __init__(self, system: LocalSystem, plain: LocalSystem, seed: int) -> None:
        """plain: without a cache; it is asked the same."""
        self._system, self._plain, self._rng = system, plain, random.Random(seed)
        self._texts: list[list[int]] = [self._random_ids(70), self._random_ids(33)]
        self.num_texts = self.num_parted = self.num_cancelled = 0

    def _random_ids(self, count: int) -> list[int]:
        return [self._rng.randrange(500) for _ in range(count)]

    def _prompt(self) -> list[int]:
        before = self._rng.choice(self._texts)
        before = before[: self._rng.choice([len(before), self._rng.randint(1, len(before))])]
        return [*before, *self._random_ids(self._rng.choice([1, 3, 20]))][:120]

    def _generation(self, number: int) -> Generation:
        rng, prompt = self._rng, self._prompt()
        max_tokens = rng.randint(1, MAX_MODEL_LEN - len(prompt))
        kind = rng.random()
        if kind < 0.15:
            width = rng.choice([2, 3])
            beam = BeamParams(width)
            return self._system.generation(prompt[:60], min(max_tokens, BLOCK_SIZE), num_choices=width, beam=beam)
        sampling = GREEDY if kind < 0.6 else SamplingParams(temperature=0.9, top_p=0.95, seed=number)
        if kind > 0.9:  # no part of this prompt may be left out
            sampling = replace(sampling, num_prompt_logprobs=1)
        num_choices = 1 if sampling.temperature == 0.0 else rng.choice([1, 2, 3])
        if num_choices > 1:  # 3 blocks and 2 of each choice: the smallest pool has 10
            prompt, max_tokens = prompt[:60], min(max_tokens, BLOCK_SIZE)
        return self._system.generation(prompt, max_tokens, sampling, num_choices=num_choices)

    def ask(self, num_rounds: int, num_each: int) -> None:
        for round_ in range(num_rounds):
            generations = [self._generation(round_ * num_each + number) for number in range(num_each)]
            expected = self._plain.run(generations)
            cancelled = set(self._rng.sample(range(num_each), num_each // 4))
            got = asyncio.run(self._ask(generations, cancelled))
            self.num_cancelled += len(cancelled)
            for generation, one, other in zip(generations, expected, got, strict=True):
                if other is not None:
                    self._compare(generation, one, other)

    async def _ask(self, generations: Sequence[Generation], cancelled: set[int]) -> list[Generated | None]:
        """Side by side. cancelled: whose clients leave soon."""
        router = await self._system.start_router()
        try:
            asked = [asyncio.ensure_future(collect(router, generation)) for generation in generations]
            for number in cancelled:
                for _ in range(self._rng.choice([1, 5, 50])):
                    await asyncio.sleep(0.0)
                asked[number].cancel()
            got = await asyncio.gather(*asked, return_exceptions=True)
            return [None if number in cancelled else _without_error(one) for number, one in enumerate(got)]
        finally:
            await router.stop()

    def _compare(self, generation: Generation, one: Generated, other: Generated) -> None:
        self.num_texts += len(one.token_ids)
        self.num_parted += sum(other.token_ids[choice] != ids for choice, ids in one.token_ids.items())
        assert other.token_ids.keys() == one.token_ids.keys()
        assert [len(part.positions) for part in other.prompts] == [len(part.positions) for part in one.prompts]
        self._texts.append([*generation.spec.prompt_ids, *self._rng.choice(list(one.token_ids.values()))])


def _without_error(one: Generated | BaseException) -> Generated:
    if isinstance(one, BaseException):
        raise one
    return one


@pytest.fixture(scope="module")
def plain(tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    with _running(_settings(tiny_goldens, "decode", has_prefix_cache=False)) as system:
        assert system.decode.engine.scheduler.prefixes is None
        yield system


def _history(system: LocalSystem, plain: LocalSystem, seed: int, num_rounds: int, num_each: int = 8) -> None:
    history = History(system, plain, seed)
    history.ask(num_rounds, num_each)
    print(f"{history.num_parted} of {history.num_texts} texts parted, {history.num_cancelled} requests cancelled")
    print(f"{_found(system)} tokens found, {_evicted(system)} blocks evicted")
    assert history.num_parted == 0
    assert _found(system) > 100
    for built in system.engines:
        built.engine.scheduler.allocator.check_integrity()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("layout", ["colocated", "split", "two_lanes"])
def test_texts_after_a_random_history(layout: str, lag: int, tiny_goldens: TinyGoldens, plain: LocalSystem) -> None:
    """With memory for two or three of the requests at a time."""
    size = {"kv_capacity_tokens": 480, "lag": lag}
    decode = _settings(tiny_goldens, "decode", layout="two_lanes" if layout == "two_lanes" else "split", **size)
    prefill = _settings(tiny_goldens, "prefill", **size) if layout == "split" else None
    with _running(decode, prefill) as system:
        assert system.decode.engine.scheduler.has_two_lanes == (layout == "two_lanes")
        _history(system, plain, seed=lag, num_rounds=3)
        assert _evicted(system) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("layout", ["colocated", "split", "two_lanes"])
@pytest.mark.parametrize("kv_capacity_tokens", [160, 192, 240, 320, 640, 1280, 8192])
def test_texts_after_long_histories(
    layout: str, lag: int, kv_capacity_tokens: int, tiny_goldens: TinyGoldens, plain: LocalSystem
) -> None:
    size = {"kv_capacity_tokens": kv_capacity_tokens, "lag": lag}
    decode = _settings(tiny_goldens, "decode", layout="two_lanes" if layout == "two_lanes" else "split", **size)
    prefill = _settings(tiny_goldens, "prefill", **size) if layout == "split" else None
    with _running(decode, prefill) as system:
        _history(system, plain, seed=kv_capacity_tokens + lag, num_rounds=12)


@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["host memory", "no host memory"])
def test_texts_of_those_who_gave_way(host_memory_bytes: int, tiny_goldens: TinyGoldens, plain: LocalSystem) -> None:
    """Blocks are shared with somebody who is swapped out; whoever is evicted is replayed."""
    size = {"kv_capacity_tokens": 320, "lag": 1, "host_memory_bytes": host_memory_bytes, "admission": OPTIMISTIC}
    with _running(_settings(tiny_goldens, "decode", **size)) as system:
        estimator = system.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(4)
        _history(system, plain, seed=7, num_rounds=3)
        preemption = system.decode.engine.scheduler.preemption
        print(f"{preemption.num_swapped} swapped, {preemption.num_evicted} evicted")
        assert (preemption.num_swapped if host_memory_bytes else preemption.num_evicted) > 0


def test_a_conversation_is_computed_once(tiny_goldens: TinyGoldens) -> None:
    """The next turn finds the turns before it, answers included, but for the last answer's last token and the rest of
    its block."""
    with _running(_settings(tiny_goldens, "decode", lag=1, kv_capacity_tokens=1024)) as system:
        engine, text = system.decode.engine, [(7 * number) % 500 for number in range(37)]
        num_known = 0
        for turn in range(3):
            before, found_before = engine.steps.num_prefilled_tokens, _found(system)
            (got,) = system.run([system.generation(text, 21)])
            num_found = num_known // BLOCK_SIZE * BLOCK_SIZE
            assert _found(system) - found_before == num_found
            assert engine.steps.num_prefilled_tokens - before == len(text) - num_found
            text = [*text, *got.token_ids[0]]
            num_known = len(text) - 1  # nothing was computed from the last token
            text += [11 + turn, 12, 13]
        assert num_found > 37 + 21


def test_decode_reads_what_it_lacks(tiny_goldens: TinyGoldens) -> None:
    decode, prefill = (_settings(tiny_goldens, pool, kv_capacity_tokens=1024) for pool in ("decode", "prefill"))
    golden, other = tiny_goldens.of(48), tiny_goldens.of(33, 5)
    with _running(decode, prefill) as system:
        assert system.prefill is not None
        for number in range(3):
            (got,) = system.run([system.generation(golden.prompt_ids, 24)])
            assert got.token_ids[0] == golden.output_ids[:24]
            # Two blocks of three are kept: one is always computed, for the logits.
            num_read = system.decode.transfers.snapshot().bytes_read // system.decode.layout.block_bytes
            assert num_read == 3 + number
            assert system.prefill.engine.steps.num_prefilled_tokens == 48 + 16 * number
        (got,) = system.run([system.generation(other.prompt_ids, 24)])
        assert got.token_ids[0] == other.output_ids[:24]


def test_salts_share_nothing(tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(48)
    with _running(_settings(tiny_goldens, "decode", kv_capacity_tokens=1024)) as system:

        def computed(salt: bytes, *, use_cache: bool = True) -> int:
            before, one = system.decode.engine.steps.num_prefilled_tokens, system.generation(golden.prompt_ids, 8)
            one = replace(one, spec=replace(one.spec, cache_salt=salt, use_cache=use_cache))
            (got,) = system.run([one])
            assert got.token_ids[0] == golden.output_ids[:8]
            return system.decode.engine.steps.num_prefilled_tokens - before

        a, b = b"a" * 16, b"b" * 16
        assert [computed(salt) for salt in (a, b, b"", a, b, b"")] == [48, 48, 48, 16, 16, 16]
        assert computed(a, use_cache=False) == 48


def test_what_gives_no_numbers_is_forgotten(tiny_goldens: TinyGoldens) -> None:
    """The attempt that found it fails, and so does no other."""
    golden, other = tiny_goldens.of(48), tiny_goldens.of(33, 5)
    with _running(_settings(tiny_goldens, "decode", kv_capacity_tokens=1024)) as system:
        built = system.decode
        for one in (golden, other):
            system.run([system.generation(one.prompt_ids, 8)])
        book = built.engine.scheduler.prefixes
        assert book is not None
        num_known = len(book.cache)
        chain = prompt_chain(chain_start(built.peer.fingerprint), golden.prompt_ids, BLOCK_SIZE)
        spoiled = book.cache.find(chain, 1)
        built.engine.runner.pool.tensor[spoiled] = torch.nan
        before = _found(system)
        (got,) = system.run([system.generation(golden.prompt_ids, 8)])
        assert _found(system) - before == 2 * BLOCK_SIZE, "the first attempt found it, the second did not"
        assert got.token_ids[0] == golden.output_ids[:8]
        assert len(book.cache) == num_known, "the other prompt stays, and this one is there again"
        (got,) = system.run([system.generation(other.prompt_ids, 8)])
        assert got.token_ids[0] == other.output_ids[:8]
        assert _found(system) - before == 4 * BLOCK_SIZE
