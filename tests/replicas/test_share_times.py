"""Times of both lanes beside each other, on a card that is only played: its clock moves when somebody waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.cuda.share_times import MeasuredPlans, times_of_shares
from scheduler.lane_measurement import AbsurdTimes, LaneTimes, measured_by
from scheduler.lane_split import WHOLE_CARD, LaneShare
from scheduler.plan import StepPlan

SHARE = LaneShare(92, 0.58, 0.48)
PLANS = MeasuredPlans(num_slots=32, num_blocks=4096, block_size=16, max_model_len=8192)


@dataclass
class Card:
    """Steps of each stream one behind the other, ms. Rows are slowed down for as long as a divided prompt runs."""

    prompts_ms: dict[LaneShare, float] = field(default_factory=lambda: {WHOLE_CARD: 50.0, SHARE: 80.0})
    rows_ms: float = 5.0
    rows_beside_ms: float = 10.0
    now_ms: float = 0.0
    free_ms: dict[Any, float] = field(default_factory=dict)
    num_unread: int = 0

    def launched(self, stream: Any, took_ms: float) -> None:
        self.now_ms += 0.2  # of the host
        self.free_ms[stream] = max(self.now_ms, self.free_ms.get(stream, 0.0)) + took_ms

    def handle(self) -> Any:
        self.num_unread += 1

        def read() -> None:
            self.num_unread -= 1

        return SimpleNamespace(result=read)

    def synchronize(self) -> None:
        self.now_ms = max([self.now_ms, *self.free_ms.values()])

    def rows(self) -> Any:
        def launch(plan: StepPlan) -> Any:
            begins_ms = max(self.now_ms, self.free_ms.get(None, 0.0))
            is_beside = self.free_ms.get(SHARE, 0.0) > begins_ms
            self.launched(None, self.rows_beside_ms if is_beside else self.rows_ms)
            return self.handle()

        return SimpleNamespace(launch=launch)

    def lane(self, share: LaneShare) -> Any:
        def launch(plan: StepPlan) -> Any:
            assert plan is PLANS.prompt
            self.launched(share, self.prompts_ms[share])
            return self.handle()

        return SimpleNamespace(stream=share, launch=launch)

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, card: Card) -> None:
        self._card, self.at_ms = card, 0.0

    def record(self, stream: Any = None) -> None:
        self.at_ms = max(self._card.now_ms, self._card.free_ms.get(stream, 0.0))

    def query(self) -> bool:
        return self._card.now_ms >= self.at_ms

    def synchronize(self) -> None:
        self._card.now_ms = max(self._card.now_ms, self.at_ms)

    def elapsed_time(self, later: Event) -> float:
        assert self._card.now_ms >= max(self.at_ms, later.at_ms), "it has not happened yet"
        return later.at_ms - self.at_ms


def measured(card: Card, monkeypatch: pytest.MonkeyPatch) -> tuple[LaneTimes, dict[LaneShare, LaneTimes]]:
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(torch.cuda, "synchronize", card.synchronize)
    lanes = {share: card.lane(share) for share in (SHARE, WHOLE_CARD)}
    found = times_of_shares(card.rows(), lanes, PLANS)
    assert card.num_unread == 0
    return found


def test_both_lanes_alone_and_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, beside = measured(Card(), monkeypatch)
    assert alone.prompts_s == pytest.approx(0.050, rel=0.02)
    assert alone.rows_s == pytest.approx(0.005, rel=0.05)
    assert beside.keys() == {SHARE}
    assert beside[SHARE].prompts_s == pytest.approx(0.080, rel=0.02)
    assert beside[SHARE].rows_s == pytest.approx(0.010, rel=0.02), "those that ran alone at the end do not count"
    (share,) = measured_by(alone, beside)
    assert share.prefill_rate == pytest.approx(0.625, rel=0.03)
    assert share.decode_rate == pytest.approx(0.5, rel=0.05)


def test_too_few_steps_beside_the_prompts_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AbsurdTimes, match=r"\d steps of rows ended beside 3 prompts"):
        measured(Card(rows_beside_ms=100.0), monkeypatch)


def test_a_prompt_and_rows_lie_apart_and_within_the_pool() -> None:
    tables = [write.block_ids for plan in (PLANS.prompt, PLANS.first_rows) for write in plan.table_writes]
    blocks = [block for table in tables for block in table]
    assert len(set(blocks)) == len(blocks)
    assert max(blocks) < 4096
    assert PLANS.num_rows == 16
    assert PLANS.prompt.num_prefill_tokens == 2048
    slots = {row.slot for row in PLANS.rows.rows}
    assert PLANS.prompt.chunks[0].slot not in slots
