"""Random traffic with cached blocks in host memory, some of which are damaged there: no text shows it.

As test_random_prefixes. Besides, after every move: what host memory says of a block is what lies in it, each host block
is in one place only, and whoever gives way finds as much host memory as if nothing were cached.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from scheduler.host_tier import HostTier
from scheduler.plan import BlockSwap
from scheduler.prefix_book import PrefixOptions
from scheduler.scheduler import Scheduler
from tests.scheduler.simulated_system import SimulatedSystem
from tests.scheduler.test_random_prefixes import WORKLOADS as WITHOUT
from tests.scheduler.test_random_prefixes import check_most_went_well, run

TIER = PrefixOptions("model", uses_host=True)
WORKLOADS = {
    name: replace(workload, prefixes=TIER, scarcity=2.0, host_share=workload.host_share or 2.0, damage_rate=0.05)
    for name, workload in WITHOUT.items()
    if "all of it" not in name
}


def _num(systems: list[SimulatedSystem], of: Callable[[HostTier], int]) -> int:
    tiers = [engine.scheduler.host_tier for system in systems for engine in (system.decode, system.prefill)]
    return sum(of(tier) for tier in tiers if tier is not None)


def _check(name: str, seeds: range) -> None:
    """Every seed, with lags of 0, 1 and 2 in turn; and these runs were worth it."""
    systems = [run(replace(WORKLOADS[name], seed=seed, lag=seed % 3)) for seed in seeds]
    check_most_went_well(systems)
    assert _num(systems, lambda tier: tier.num_saved_blocks) > 10 * len(seeds)
    assert _num(systems, lambda tier: tier.num_found_tokens) > (0 if "little" in name else 5 * len(seeds))
    runners = [engine.runner for system in systems for engine in (system.decode, system.prefill)]
    num_damaged = _num(systems, lambda tier: tier.num_damaged_blocks)
    assert sum(runner.num_damaged for runner in runners) >= num_damaged >= ("little" not in name)
    if "preemption" in name:
        assert sum(system.decode.scheduler.preemption.num_swapped for system in systems) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_some_histories(name: str) -> None:
    _check(name, range(1, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.timeout(1200)
def test_many_histories(name: str) -> None:
    _check(name, range(100, 300))


class _SavesWhateverIsThere(HostTier):
    """What was copied counts though something else was written into the block meanwhile."""

    def saved(self, step_id: int) -> None:
        self._host.saved(step_id, lambda block_id, name: True)


class _BeginsAtOnce(HostTier):
    """A prompt is computed from what is still on its way."""

    def fetch(self, step_id: int, *, has_rows: bool) -> int:
        num_fetched = super().fetch(step_id, has_rows=has_rows)
        for coming in list(self._coming.values()):
            coming.num_here = coming.num_planned
            self._book.came_back(coming.request, coming.num_here)
            self._begin(coming)
        return num_fetched


class _NoticesNoDamage(HostTier):
    def fetched(self, step_id: int, damaged: Collection[BlockSwap]) -> None:
        super().fetched(step_id, ())


def _with_tier(kind: type[HostTier]) -> Callable[[Scheduler], None]:
    def change(scheduler: Scheduler) -> None:
        assert scheduler.host_tier is not None
        scheduler.host_tier.__class__ = kind

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_tier(_SavesWhateverIsThere), "it is not what it says"),
        (_with_tier(_BeginsAtOnce), "was named before it was written"),
        (_with_tier(_NoticesNoDamage), "was named before it was written"),
    ],
    ids=["saves whatever is there", "begins at once", "notices no damage"],
)
def test_faults_put_there_on_purpose_are_found(change: Callable[[Scheduler], None], message: str) -> None:
    workload = replace(WORKLOADS["split"], host_share=0.5)

    def run_until_found() -> None:
        for seed in range(200):
            run(replace(workload, seed=seed, lag=seed % 3), change)

    with pytest.raises(AssertionError, match=message):
        run_until_found()
