"""Rows with drafts under random traffic: whatever holds of them, texts, blocks and promises are as without.

As test_random_workloads. A draft's KV that is read although the draft did not count, a block that was given back while
a step in flight writes it, or a row beside where its sequence is, is a wrong text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.decode_batcher import DecodeBatcher
from scheduler.draft_planner import DraftPlanner, DraftRoom
from scheduler.plan import Accepted, Slice
from scheduler.prefix_book import PrefixOptions
from scheduler.request import Request
from scheduler.request import Sequence as Choice
from tests.scheduler.paged_model import PagedRunner
from tests.scheduler.simulated_system import SimulatedSystem, Status, Workload
from tests.scheduler.test_random_preemption import OPTIMISTIC
from tests.scheduler.test_random_workloads import FAULTS

CALM = Workload(0, 0, num_requests=80, cancel_rate=0.1, beam_rate=0.1, max_drafts=5)
SCARCE = replace(CALM, admission=OPTIMISTIC, scarcity=1.5)
WORKLOADS = {
    "colocated": replace(CALM, local_share=1.0),
    "split": replace(CALM, local_share=0.1, faults=FAULTS),
    "two lanes": replace(CALM, local_share=1.0, two_lanes=True, faults=FAULTS),
    "can do all": replace(CALM, local_share=0.4, all_able=True, faults=FAULTS),
    "tokens to be known": replace(CALM, local_share=1.0, known_rate=0.5),
    "prefixes": replace(CALM, local_share=0.5, prefixes=PrefixOptions("model")),
    "prefixes, two lanes": replace(CALM, local_share=1.0, two_lanes=True, prefixes=PrefixOptions("model")),
    "preemption": replace(SCARCE, local_share=0.5, host_share=3.0),
    "preemption, little host memory": replace(SCARCE, local_share=0.5, host_share=0.3, faults=FAULTS),
    "preemption, two lanes": replace(SCARCE, local_share=0.9, host_share=3.0, two_lanes=True),
    "preemption, prefixes": replace(SCARCE, local_share=0.5, host_share=3.0, prefixes=PrefixOptions("model")),
}


def check(name: str, seeds: range) -> None:
    """Every seed, with lags of 0 to 3 and drafts that hold never to always in turn; and these runs were worth it."""
    systems = []
    for seed in seeds:
        systems.append(SimulatedSystem(replace(WORKLOADS[name], seed=seed, lag=seed % 4, right_drafts=(seed % 5) / 4)))
        systems[-1].run()
        statuses = systems[-1].statuses()
        assert statuses[Status.OPEN] == 0
        assert statuses[Status.FINISHED] > systems[-1].workload.num_requests // 4
    drafts = [system.decode.drafts for system in systems if system.decode.drafts is not None]
    assert sum(one.num_drafted for one in drafts) > 15 * len(seeds)
    assert sum(one.num_held for one in drafts) > 4 * len(seeds)
    assert sum(one.num_none for one in drafts) > 0
    assert sum(system.decode.num_given_back for system in systems) > 0
    if "preemption" in name:
        assert sum(system.decode.scheduler.preemption.num_swapped for system in systems) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_some_histories(name: str) -> None:
    check(name, range(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_more_histories(name: str) -> None:
    check(name, range(4, 20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.timeout(1200)
def test_many_histories(name: str) -> None:
    check(name, range(100, 300))


class _GivesBackTooMuch(DecodeBatcher):
    """As if the rows in flight behind a settled one were not there."""

    def settle(self, accepted: Accepted) -> None:
        super().settle(accepted)
        request = self._running.get(accepted.request_id)
        for choice in request.sequences if request is not None else ():
            if choice.choice == accepted.choice and choice.num_known < choice.num_planned and choice.block_ids:
                written = (request.prompt_len + choice.num_known - 2) // self._block_size + 1  # type: ignore[union-attr]
                self._allocator.release(choice.block_ids[written:])
                del choice.block_ids[written:]


class _DraftsIntoWhatIsPromised(DraftPlanner):
    def _within(self, room: DraftRoom, position: int, num_held: int, count: int) -> tuple[int, DraftRoom]:
        return super()._within(room._replace(num_ahead=1 << 30), position, num_held, count)


class _DraftsBeyondTheEnd(DraftPlanner):
    def _row(self, request: Request, choice: Choice) -> object:  # type: ignore[override]
        return super()._row(request, choice)._replace(most=self.max_drafts if request.may_draft else 0)


class _RowsWhereTheyWerePlanned(PagedRunner):
    """As if all drafts in flight counted."""

    def _resolved(self, row: Slice) -> Slice:
        return super()._resolved(row)._replace(start=row.start)


def _batcher(system: SimulatedSystem) -> None:
    system.decode.scheduler.batch.__class__ = _GivesBackTooMuch


def _planner(kind: type[DraftPlanner]) -> Callable[[SimulatedSystem], None]:
    def change(system: SimulatedSystem) -> None:
        assert system.decode.scheduler.drafts is not None
        system.decode.scheduler.drafts.__class__ = kind

    return change


def _runner(system: SimulatedSystem) -> None:
    system.decode.runner.__class__ = _RowsWhereTheyWerePlanned


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_batcher, "too many, or too few"),
        (_planner(_DraftsIntoWhatIsPromised), "over the budget"),
        (_planner(_DraftsBeyondTheEnd), "drafts beyond the end"),
        (_runner, None),  # another text, wherever that shows first
    ],
    ids=["gives back too much", "drafts into what is promised", "drafts beyond the end", "rows where planned"],
)
def test_faults_put_there_on_purpose_are_found(change: Callable[[SimulatedSystem], None], message: str | None) -> None:
    def run_until_found() -> None:
        for seed in range(100):
            system = SimulatedSystem(replace(WORKLOADS["colocated"], seed=seed, lag=1 + seed % 2))
            change(system)
            system.run()

    with pytest.raises(AssertionError, match=message):
        run_until_found()
