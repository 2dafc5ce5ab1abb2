"""How long steps of both lanes take, alone and beside each other, for each way to divide a card: measured at start."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Protocol

import torch

from replicas.model.model_runner import ModelRunner, StepHandle
from scheduler.lane_measurement import AbsurdTimes, LaneTimes
from scheduler.lane_split import WHOLE_CARD, LaneShare
from scheduler.memory_budget import num_blocks_for
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_PROMPT_LEN, _CONTEXT, _NUM_ROWS = 2048, 1024, 16  # at most
_NUM_PROMPTS, _NUM_STEPS = 3, 12  # of a measurement
_AHEAD = 2  # steps of rows that are launched before one is waited for
_FEWEST_STEPS = 3


class PromptLane(Protocol):
    """The prefill lane's runner for one share."""

    stream: torch.cuda.Stream

    def launch(self, plan: StepPlan) -> StepHandle: ...


class MeasuredPlans:
    """A prompt, and a step of rows, in slots and blocks of their own. Both may be repeated."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_rows: int = _NUM_ROWS,
        context: int = _CONTEXT,
    ) -> None:
        """num_rows, context: of the step of rows, at most. Raises AbsurdTimes if there is too little memory."""
        prompt_len = min(_PROMPT_LEN, max_model_len - 1)
        self.num_rows = min(num_rows, num_slots - 1)
        of_prompt = num_blocks_for(prompt_len + 1, block_size)
        of_row = (num_blocks - of_prompt) // max(1, self.num_rows)
        of_row = min(of_row, num_blocks_for(min(context, max_model_len - 1), block_size))
        if self.num_rows < 1 or of_row < 1:
            raise AbsurdTimes(f"{num_blocks} blocks and {num_slots} slots are too few to measure in")
        rows = tuple(Slice(f"row-{slot}", 0, slot, of_row * block_size - 1) for slot in range(self.num_rows))
        tables = [range(of_prompt + slot * of_row, of_prompt + (slot + 1) * of_row) for slot in range(self.num_rows)]
        self.first_rows = StepPlan(
            0,
            tuple(SlotInit(slot, 0, _GREEDY, 1) for slot in range(self.num_rows)),
            tuple(TableWrite(slot, 0, tuple(table)) for slot, table in enumerate(tables)),
            (),
            rows,
        )
        self.rows = StepPlan(0, (), (), (), rows)
        slot, ids = self.num_rows, tuple(1 + index % 100 for index in range(prompt_len))
        chunk = Slice.of_prompt("prompt", slot, 0, ids, (SampleTarget(slot, 0),))
        write = TableWrite(slot, 0, tuple(range(of_prompt)))
        self.prompt = StepPlan(0, (SlotInit(slot, 0, _GREEDY, None),), (write,), (), (chunk,))


def times_of_shares(
    rows: ModelRunner, lanes: dict[LaneShare, PromptLane], plans: MeasuredPlans
) -> tuple[LaneTimes, dict[LaneShare, LaneTimes]]:
    """Both lanes' steps alone on the whole card, and beside each other for each share of `lanes` but WHOLE_CARD.

    Blocks for a second or two. Mutates pool blocks and slots: nobody else may use them. Raises AbsurdTimes.
    """
    rows.launch(plans.first_rows).result()
    for lane in lanes.values():
        lane.launch(plans.prompt).result()
    alone = LaneTimes(_prompts_alone_s(lanes[WHOLE_CARD], plans), _rows_alone_s(rows, plans))
    beside = {share: _beside(rows, lane, plans) for share, lane in lanes.items() if share is not WHOLE_CARD}
    return alone, beside


def _rows_alone_s(rows: ModelRunner, plans: MeasuredPlans) -> float:
    first, last = _event(), _event()
    first.record()
    handles = [rows.launch(plans.rows) for _ in range(_NUM_STEPS)]
    last.record()
    _read(handles)
    return _seconds(first, last) / _NUM_STEPS


def _prompts_alone_s(lane: PromptLane, plans: MeasuredPlans) -> float:
    first, last, handles = _launched_prompts(lane, plans)
    _read(handles)
    return _seconds(first, last) / _NUM_PROMPTS


def _beside(rows: ModelRunner, lane: PromptLane, plans: MeasuredPlans) -> LaneTimes:
    """Steps of rows go on until the prompts are through; only those count that ended before."""
    first, last, handles = _launched_prompts(lane, plans)
    ends: list[torch.cuda.Event] = []
    while not last.query():
        handles.append(rows.launch(plans.rows))
        ends.append(_event())
        ends[-1].record()
        if len(ends) > _AHEAD:
            ends[-1 - _AHEAD].synchronize()
    _read(handles)
    within = [end for end in ends if _seconds(end, last) >= 0.0]
    if len(within) <= _FEWEST_STEPS:
        raise AbsurdTimes(f"{len(within)} steps of rows ended beside {_NUM_PROMPTS} prompts")
    rows_s = fmean(_seconds(before, after) for before, after in pairwise(within))
    return LaneTimes(_seconds(first, last) / _NUM_PROMPTS, rows_s)


def _launched_prompts(
    lane: PromptLane, plans: MeasuredPlans
) -> tuple[torch.cuda.Event, torch.cuda.Event, list[StepHandle]]:
    """With the events of their begin and end."""
    torch.cuda.synchronize()
    first, last = _event(), _event()
    first.record(lane.stream)
    handles = [lane.launch(plans.prompt) for _ in range(_NUM_PROMPTS)]
    last.record(lane.stream)
    return first, last, handles


def _read(handles: list[StepHandle]) -> None:
    for handle in handles:
        handle.result()
    torch.cuda.synchronize()


def _seconds(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3


def _event() -> torch.cuda.Event:
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return make(enable_timing=True)
