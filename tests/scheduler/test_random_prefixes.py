"""Random traffic whose prompts begin as others do: with a prefix cache no text, no block and no promise is wrong.

As test_random_workloads, checked after every move: a name says what lies in its block, whoever finds a block has the
salt of who filled it, and what several requests hold is counted once (`brute_cache`). And faults that were put there on
purpose are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from scheduler.block_chain import prompt_chain
from scheduler.outcome import Load
from scheduler.plan import Slice
from scheduler.prefix_book import PrefixBook, PrefixOptions
from scheduler.prefix_hash import chain_start
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload
from tests.scheduler.test_random_preemption import OPTIMISTIC
from tests.scheduler.test_random_workloads import FAULTS

CALM = Workload(0, 0, num_requests=60, cancel_rate=0.1, beam_rate=0.1, prefixes=PrefixOptions("model"))
SCARCE = replace(CALM, admission=OPTIMISTIC, scarcity=1.5)
WORKLOADS = {
    "colocated": replace(CALM, local_share=1.0, known_rate=0.1),
    "split": replace(CALM, local_share=0.1, faults=FAULTS),
    "split, all of it read": replace(CALM, local_share=0.1, prefixes=PrefixOptions("model", reads_rest=False)),
    "two lanes": replace(CALM, local_share=1.0, two_lanes=True, faults=FAULTS),
    "both can do all": replace(CALM, local_share=0.4, all_able=True, faults=FAULTS),
    "both can do all, two lanes": replace(CALM, local_share=0.4, all_able=True, two_lanes=True, faults=FAULTS),
    "preemption": replace(SCARCE, local_share=0.5, host_share=3.0),
    "preemption, little host memory": replace(SCARCE, local_share=0.5, host_share=0.3, faults=FAULTS),
    "preemption, two lanes": replace(SCARCE, local_share=0.9, host_share=3.0, two_lanes=True),
}


def run(workload: Workload, change: Callable[[Scheduler], None] | None = None) -> SimulatedSystem:
    """change: is given both schedulers before they are used."""
    system = SimulatedSystem(workload)
    if change is not None:
        for engine in (system.decode, system.prefill):
            change(engine.scheduler)
    system.run()
    statuses = system.statuses()
    assert statuses[Status.OPEN] == 0
    assert statuses[Status.FINISHED] > 0
    return system


def check_most_went_well(systems: Sequence[SimulatedSystem]) -> None:
    """Of one history alone an engine that fails again and again may have ended nearly all."""
    num_finished = sum(system.statuses()[Status.FINISHED] for system in systems)
    assert num_finished > sum(system.workload.num_requests for system in systems) // 3


def _check(name: str, seeds: range) -> None:
    """Every seed, with lags of 0, 1 and 2 in turn; and these runs were worth it."""
    systems = [run(replace(WORKLOADS[name], seed=seed, lag=seed % 3)) for seed in seeds]
    check_most_went_well(systems)
    engines = [engine for system in systems for engine in (system.decode, system.prefill)]
    caches = [engine.scheduler.prefixes.cache for engine in engines if engine.scheduler.prefixes is not None]
    assert len(caches) == len(engines)
    assert sum(engine.cache.num_found for engine in engines) > 10 * len(seeds)
    assert sum(engine.cache.num_shared for engine in engines) > 0
    assert sum(cache.num_evicted for cache in caches) > 10 * len(seeds)
    if "split" in name:
        assert (sum(system.num_kept for system in systems) > 0) == ("all of it" not in name)
    if "preemption" in name:
        assert sum(system.decode.scheduler.preemption.num_swapped for system in systems) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_some_histories(name: str) -> None:
    _check(name, range(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_more_histories(name: str) -> None:
    _check(name, range(3, 12))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.timeout(1200)
def test_many_histories(name: str) -> None:
    _check(name, range(100, 300))


class _NamesBeforeCommit(Scheduler):
    """A chunk can be found as soon as it is planned."""

    def _plan_chunks(self, token_budget: int, now_s: float) -> list[Slice]:
        chunks = super()._plan_chunks(token_budget, now_s)
        assert self.prefixes is not None
        for chunk in chunks:
            self.prefixes.computed(self._requests[chunk.request_id], chunk.end)
        return chunks


class _KeysWithoutSalt(PrefixBook):
    """Whoever has the same prompt finds it."""

    def submitted(self, request: Request) -> None:
        request.chain = prompt_chain(chain_start("model"), request.spec.prompt_ids, self._block_size)


class _FindsWhatIsBeingRead(Scheduler):
    """Blocks can be found while a transfer, which holds them, still writes them."""

    def begin_load(self, request_id: str, now_s: float) -> Load:
        load = super().begin_load(request_id, now_s)
        self._loaded(self._requests[request_id])
        return load


def _with_book(book: type[PrefixBook]) -> Callable[[Scheduler], None]:
    def change(scheduler: Scheduler) -> None:
        assert scheduler.prefixes is not None
        scheduler.prefixes.__class__ = book

    return change


def _with_scheduler(kind: type[Scheduler]) -> Callable[[Scheduler], None]:
    def change(scheduler: Scheduler) -> None:
        scheduler.__class__ = kind

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_scheduler(_NamesBeforeCommit), "was named before it was written"),
        (_with_book(_KeysWithoutSalt), "what was found is another client's"),
        (_with_scheduler(_FindsWhatIsBeingRead), "was named before it was written"),
    ],
    ids=["named before commit", "keys without salt", "found while it is read"],
)
def test_faults_put_there_on_purpose_are_found(change: Callable[[Scheduler], None], message: str) -> None:
    workload = replace(WORKLOADS["split"], local_share=0.5, faults=CALM.faults)

    def run_until_found() -> None:
        for seed in range(200):
            run(replace(workload, seed=seed, lag=seed % 3), change)

    with pytest.raises(AssertionError, match=message):
        run_until_found()
