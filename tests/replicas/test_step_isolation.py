"""A step run in pieces gives what it gives whole, with everything that goes before the pass done once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicas.engine.step_isolation import run_isolated
from scheduler.plan import (
    Accepted,
    BlockCopy,
    BlockSwap,
    SampledToken,
    SampleTarget,
    Slice,
    SlotInit,
    StepOutput,
    StepPlan,
    TableWrite,
)
from scheduler.sampling_params import SamplingParams

PLAN = StepPlan(
    step_id=7,
    slot_inits=(SlotInit(0, 0, SamplingParams(), 5),),
    table_writes=(TableWrite(0, 0, (3,)),),
    copies=(BlockCopy(1, 2),),
    slices=(
        Slice("a", 0, 0, 4),
        Slice("b", 0, 1, 8),
        Slice("b", 1, 3, 8),
        Slice.of_prompt("c", 2, 0, (9, 9), (SampleTarget(2, 0), SampleTarget(2, 1))),
    ),
    swap_outs=(BlockSwap(5, 0),),
    swap_ins=(BlockSwap(6, 1),),
    fetches=(BlockSwap(7, 2),),
    saves=(BlockSwap(8, 3),),
)


class _Handle:
    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def result(self) -> StepOutput:
        tokens = [SampledToken(row.request_id, row.choice, row.slot) for row in self._plan.rows]
        tokens += [SampledToken(c.request_id, t, 40 + t) for c in self._plan.chunks for t in c.sampled_choices]
        accepted = tuple(Accepted(row.request_id, row.choice, 1, row.num_tokens) for row in self._plan.rows)
        return StepOutput(self._plan.step_id, tuple(tokens), accepted=accepted, damaged=self._plan.fetches)


class _Runner:
    def __init__(self, failing: str) -> None:
        self.pieces: list[StepPlan] = []
        self._failing = failing

    def launch(self, plan: StepPlan) -> _Handle:
        self.pieces.append(plan)
        if any(part.request_id == self._failing for part in plan.slices):
            raise RuntimeError("boom")
        return _Handle(plan)


def test_pieces_cover_the_plan_once() -> None:
    runner = _Runner(failing="none")
    isolated = run_isolated(runner, PLAN)  # type: ignore[arg-type]
    assert isolated.errors == {}
    assert isolated.output == _Handle(PLAN).result()
    assert [len(p.slices) for p in runner.pieces] == [0, 1, 1, 1, 1]
    assert runner.pieces[0] == replace(PLAN, slices=())
    nothing = replace(PLAN, slot_inits=(), table_writes=(), copies=(), swap_outs=(), swap_ins=(), fetches=(), saves=())
    assert all(replace(p, slices=PLAN.slices) == nothing for p in runner.pieces[1:])


def test_a_failing_request_is_left_out_and_named() -> None:
    runner = _Runner(failing="b")
    isolated = run_isolated(runner, PLAN)  # type: ignore[arg-type]
    assert list(isolated.errors) == ["b"]
    assert [token.request_id for token in isolated.output.tokens] == ["a", "c", "c"]
    assert len(runner.pieces) == 1 + 3  # b's second choice is not tried


def test_what_goes_before_the_pass_is_nobodys_own() -> None:
    class Broken(_Runner):
        def launch(self, plan: StepPlan) -> _Handle:
            if plan.is_empty:
                raise RuntimeError("a swap failed")
            return super().launch(plan)

    with pytest.raises(RuntimeError, match="a swap failed"):
        run_isolated(Broken(failing="none"), PLAN)  # type: ignore[arg-type]
