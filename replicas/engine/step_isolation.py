"""One request's failure must not be its batch-mates'.

A step that raises is run again in pieces, one sequence at a time. That is sound because a pass may be
repeated: it writes the same KV to the same positions, and the slots remember its tokens only when nothing can
fail any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from replicas.model.model_runner import ModelRunner
from scheduler.plan import StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class IsolatedOutput:
    """What ran, and the error of each request that did not."""

    output: StepOutput
    errors: dict[str, Exception]


def run_isolated(runner: ModelRunner, plan: StepPlan) -> IsolatedOutput:
    """Run the plan piece by piece. Blocks for all of them; never raises for a piece's own failure.

    Raises when what goes before the pass fails: that is nobody's own, and blocks may have got lost.
    """
    runner.launch(replace(plan, slices=()))
    outputs: list[StepOutput] = []
    errors: dict[str, Exception] = {}
    for request_id, piece in _pieces(plan):
        if request_id in errors:
            continue
        try:
            outputs.append(runner.launch(piece).result())
        except Exception as error:  # whatever it is, it ends this request only
            errors[request_id] = error
    tokens = tuple(token for output in outputs for token in output.tokens)
    prompts = tuple(prompt for output in outputs for prompt in output.prompts)
    accepted = tuple(one for output in outputs for one in output.accepted)
    return IsolatedOutput(StepOutput(plan.step_id, tokens, prompts, accepted), errors)


def _pieces(plan: StepPlan) -> Iterator[tuple[str, StepPlan]]:
    """One request's part each, without what goes before the pass: repeated, a slot init would undo a token just
    sampled, and a copy or a swap would undo what an earlier piece wrote into it."""
    plan = replace(plan, slot_inits=(), table_writes=(), copies=(), swap_outs=(), swap_ins=())
    for part in plan.slices:
        yield part.request_id, replace(plan, slices=(part,))
