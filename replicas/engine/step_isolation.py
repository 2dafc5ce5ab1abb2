"""One request's failure must not be its batch-mates'.

A step that raises is run again in pieces, one sequence at a time. That is sound because a pass may be
repeated: it writes the same KV to the same positions, and the slots remember its tokens only when nothing can
fail any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from replicas.model.model_runner import ModelRunner
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.plan import StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class IsolatedOutput:
    """What ran, and the error of each request that did not."""

    output: StepOutput
    errors: dict[str, Exception]


def run_isolated(runner: ModelRunner, plan: StepPlan, masks: TokenMasks | None = None) -> IsolatedOutput:
    """Run the plan piece by piece. Blocks for all of them; never raises for a piece's own failure. masks: the plan's.

    Raises when what goes before the pass fails: that is nobody's own, and blocks may have got lost.
    """
    prepared = runner.launch(replace(plan, slices=())).result()
    outputs: list[StepOutput] = []
    errors: dict[str, Exception] = {}
    for request_id, piece, first_row in _pieces(plan):
        if request_id in errors:
            continue
        own = None if masks is None else masks.of_rows(first_row, _num_rows(piece))
        try:
            handle = runner.launch(piece) if own is None else runner.choose(runner.forward(piece), own)
            outputs.append(handle.result())
        except Exception as error:  # whatever it is, it ends this request only
            errors[request_id] = error
    tokens = tuple(token for output in outputs for token in output.tokens)
    prompts = tuple(prompt for output in outputs for prompt in output.prompts)
    accepted = tuple(one for output in outputs for one in output.accepted)
    return IsolatedOutput(StepOutput(plan.step_id, tokens, prompts, accepted, prepared.damaged), errors)


def _pieces(plan: StepPlan) -> Iterator[tuple[str, StepPlan, int]]:
    """One request's part each, and its first row of logits in the whole step's. Without what goes before the pass:
    repeated, a slot init would undo a token just sampled, and a copy or a swap what an earlier piece wrote into it."""
    plan = replace(plan, slot_inits=(), table_writes=(), copies=(), swap_outs=(), swap_ins=(), fetches=(), saves=())
    first_row = 0
    for part in plan.slices:
        piece = replace(plan, slices=(part,))
        yield part.request_id, piece, first_row
        first_row += _num_rows(piece)


def _num_rows(plan: StepPlan) -> int:
    """How many rows of logits it has, at most."""
    return sum([part.most_sampled + len(part.forks) for part in plan.slices])
