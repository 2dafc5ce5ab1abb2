"""Engines that keep cached blocks in host memory: each text is that of an engine without a cache, whatever came before.

As test_prefix_cache. Float32, a tiny model, and device pools so small that what is found soon comes from the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from replicas.kv.host_pool import MovedBlocks
from replicas.serving.engine_builder import BuiltEngine
from replicas.settings import EngineSettings
from scheduler.block_chain import prompt_chain
from scheduler.host_tier import HostTier
from scheduler.length_estimator import LengthEstimator
from scheduler.plan import StepPlan
from scheduler.prefix_hash import chain_start
from tests.engines.local_system import LocalSystem
from tests.engines.test_prefix_cache import BLOCK_SIZE, OPTIMISTIC, _history, _running, _settings
from tests.engines.tiny_goldens import TinyGoldens

LARGE = 1 << 24


@pytest.fixture(scope="module")
def plain(tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    with _running(_settings(tiny_goldens, "decode", has_prefix_cache=False)) as system:
        yield system


def _tier(built: BuiltEngine) -> HostTier:
    tier = built.engine.scheduler.host_tier
    assert tier is not None
    return tier


def _colocated(tiny_goldens: TinyGoldens, **changes: Any) -> EngineSettings:
    settings = {"layout": "colocated", "host_memory_bytes": LARGE, "lag": 1, "kv_capacity_tokens": 640} | changes
    return _settings(tiny_goldens, "decode", **settings)


def _check_host(built: BuiltEngine) -> None:
    """Nobody is left in host memory, and soon nothing is on its way."""
    scheduler, deadline_s = built.engine.scheduler, time.monotonic() + 120.0
    while _tier(built).is_busy or scheduler.host.num_used:
        assert time.monotonic() < deadline_s, "somebody is left in host memory"
        time.sleep(0.01)
    scheduler.host.check_integrity(())


@pytest.mark.parametrize(
    ("layout", "lag"),
    [
        ("colocated", 1),
        pytest.param("colocated", 0, marks=pytest.mark.slow),
        pytest.param("split", 0, marks=pytest.mark.slow),
        pytest.param("split", 1, marks=pytest.mark.slow),
        pytest.param("two_lanes", 0, marks=pytest.mark.slow),
        pytest.param("two_lanes", 1, marks=pytest.mark.slow),
    ],
)
def test_texts_after_a_random_history(layout: str, lag: int, tiny_goldens: TinyGoldens, plain: LocalSystem) -> None:
    size = {"kv_capacity_tokens": 320, "lag": lag, "host_memory_bytes": LARGE, "layout": layout}
    prefill = _settings(tiny_goldens, "prefill", **size) if layout == "split" else None
    with _running(_settings(tiny_goldens, "decode", **size), prefill) as system:
        _history(system, plain, seed=20 + lag, num_rounds=3)
        built = system.decode if system.prefill is None else system.prefill
        assert _tier(built).num_saved_blocks > 0
        assert not _tier(built).num_damaged_blocks
        _check_host(built)
        if layout == "split":
            assert system.decode.engine.scheduler.host_tier is None, "what decode finds it reads from prefill"


@pytest.mark.slow
@pytest.mark.parametrize("host_memory_bytes", [LARGE, 1 << 17], ids=["much host memory", "little host memory"])
def test_texts_of_those_who_gave_way(host_memory_bytes: int, tiny_goldens: TinyGoldens, plain: LocalSystem) -> None:
    """Who gives way takes host blocks from the cache."""
    small = {"kv_capacity_tokens": 320, "admission": OPTIMISTIC, "host_memory_bytes": host_memory_bytes}
    with _running(_colocated(tiny_goldens, **small)) as system:
        scheduler = system.decode.engine.scheduler
        assert isinstance(scheduler.budget.estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            scheduler.budget.estimator.observe(4)
        _history(system, plain, seed=7, num_rounds=3)
        assert scheduler.preemption.num_swapped > 0
        assert _tier(system.decode).num_saved_blocks > 0
        _check_host(system.decode)


@pytest.mark.slow
def test_who_comes_back_damaged_is_begun_anew(
    tiny_goldens: TinyGoldens, plain: LocalSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Of those who gave way each first block is changed in host memory, until two have come back so."""
    with _running(_colocated(tiny_goldens, kv_capacity_tokens=320, admission=OPTIMISTIC)) as system:
        engine = system.decode.engine
        assert isinstance(engine.scheduler.budget.estimator, LengthEstimator)
        for _ in range(100):
            engine.scheduler.budget.estimator.observe(4)
        host_pool, num_damaged = engine.runner.host_pool, 0
        move = host_pool.move

        def damage_and_move(plan: StepPlan) -> MovedBlocks | None:
            nonlocal num_damaged
            if plan.swap_ins and num_damaged < 2:
                host_pool.tensor[plan.swap_ins[0].host].view(torch.uint8)[0, 0, 0, 0, 1] ^= 0x10
                num_damaged += 1
            return move(plan)

        host_pool.move = damage_and_move  # type: ignore[method-assign]
        _history(system, plain, seed=7, num_rounds=3)
        assert num_damaged > 0
        records = [record for record in caplog.records if getattr(record, "event", "") == "host_blocks_damaged"]
        assert len(records) == num_damaged
        _check_host(system.decode)


class Asked:
    """The same prompt again, when everything of it has gone from the device."""

    def __init__(self, system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
        self.system, self.built = system, system.decode if system.prefill is None else system.prefill
        self.golden = tiny_goldens.of(48)
        self._num_others = 0
        self._ask()

    def _ask(self) -> None:
        (got,) = self.system.run([self.system.generation(self.golden.prompt_ids, 24)])
        assert got.token_ids[0] == self.golden.output_ids[:24]

    def push_out(self) -> None:
        scheduler = self.built.engine.scheduler
        assert scheduler.prefixes is not None
        chain = prompt_chain(chain_start(self.built.peer.fingerprint), self.golden.prompt_ids, BLOCK_SIZE)
        num_rounds = 0
        while scheduler.prefixes.cache.find(chain, 1):
            self._num_others += 1
            other = [(11 * self._num_others + 7 * place) % 499 for place in range(60)]
            self.system.run([self.system.generation(other, 4)])
            num_rounds += 1
            assert num_rounds < 30, "it does not go"

    def again(self) -> tuple[int, int]:
        """Tokens that were found in host memory, and tokens that were computed; the text is right."""
        found, steps = _tier(self.built).num_found_tokens, self.built.engine.steps
        computed = steps.num_prefilled_tokens
        self._ask()
        return _tier(self.built).num_found_tokens - found, steps.num_prefilled_tokens - computed


@pytest.mark.parametrize(("layout", "lag"), [("colocated", 0), ("split", 1), ("two_lanes", 1)])
def test_what_has_gone_from_the_device_comes_back(layout: str, lag: int, tiny_goldens: TinyGoldens) -> None:
    settings = _colocated(tiny_goldens, layout=layout, lag=lag)
    prefill = replace(settings, pool="prefill") if layout == "split" else None
    with _running(settings, prefill) as system:
        asked = Asked(system, tiny_goldens)
        for _ in range(2):
            asked.push_out()
            assert asked.again() == (32, 16)
        told, tier = asked.built.metadata(), _tier(asked.built)
        num_host_blocks = asked.built.engine.scheduler.host.num_blocks
        assert tier.num_saved_blocks > 0 < num_host_blocks
        assert told["num_prefix_blocks"] == told["num_blocks"] + num_host_blocks, "so much routers may believe it has"
        assert asked.again() == (0, 16), "it is on the device again"
        _check_host(asked.built)


def test_without_host_memory_it_is_computed_again(tiny_goldens: TinyGoldens) -> None:
    for none in ({"host_memory_bytes": 0}, {"host_memory_bytes": None}):
        with _running(_colocated(tiny_goldens, **none)) as system:
            assert system.decode.engine.scheduler.host_tier is None
            asked = Asked(system, tiny_goldens)
            asked.push_out()
            asked._ask()
            assert system.decode.engine.scheduler.host.num_blocks == 0


def test_one_host_block_is_no_use_but_no_harm(tiny_goldens: TinyGoldens) -> None:
    settings = _colocated(tiny_goldens)
    with _running(settings) as system:
        block_bytes = system.decode.layout.block_bytes
    with _running(replace(settings, host_memory_bytes=block_bytes)) as system:
        assert system.decode.engine.scheduler.host.num_blocks == 1
        asked = Asked(system, tiny_goldens)
        for _ in range(2):
            asked.push_out()
            assert asked.again()[1] >= 32
        assert _tier(system.decode).num_saved_blocks > 2
        _check_host(system.decode)


@pytest.mark.parametrize(("layout", "place"), [("colocated", 0), ("split", 1), ("two_lanes", 1)])
def test_a_damaged_host_block_is_noticed_and_nothing_is_computed_from_it(
    layout: str, place: int, tiny_goldens: TinyGoldens, caplog: pytest.LogCaptureFixture
) -> None:
    settings = _colocated(tiny_goldens, layout=layout)
    prefill = replace(settings, pool="prefill") if layout == "split" else None
    with _running(settings, prefill) as system:
        asked = Asked(system, tiny_goldens)
        asked.push_out()
        built = asked.built
        chain = prompt_chain(chain_start(built.peer.fingerprint), asked.golden.prompt_ids, BLOCK_SIZE)
        host_id = built.engine.scheduler.host._cached[chain.keys[place]].host_id
        flipped = built.engine.runner.host_pool.tensor[host_id].view(torch.uint8)
        flipped[0, 1, 3, 0, 2] ^= 0x40
        assert asked.again() == (place * BLOCK_SIZE, 48 - place * BLOCK_SIZE)
        assert _tier(built).num_damaged_blocks == 1
        assert [record.num_blocks for record in caplog.records if "damaged" in record.getMessage()] == [1]
        assert _value(built, "splitserve_host_damaged_blocks") == 1
        asked.push_out()
        assert asked.again() == (32, 16), "it was computed and saved again"
        _check_host(built)


def _value(built: BuiltEngine, name: str) -> float:
    (family,) = [family for family in built.metrics_snapshot() if family["name"].startswith(name)]
    return sum(value for suffix, _, value in family["samples"] if suffix != "_created")
