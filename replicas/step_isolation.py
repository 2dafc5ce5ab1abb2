"""One request's failure must not be its batch-mates' (design law 6).

A step that raises is run again in pieces, one sequence at a time. That is sound because a step may be
repeated: it writes the same KV to the same positions, its block copies are of blocks that nobody writes
meanwhile, and sampling has no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from replicas.model_runner import ModelRunner
from scheduler.plan import SampledToken, StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class IsolatedOutput:
    """What ran, and the error of each request that did not."""

    output: StepOutput
    errors: dict[str, Exception]


def run_isolated(runner: ModelRunner, plan: StepPlan) -> IsolatedOutput:
    """Run the plan piece by piece. Blocks for all of them; never raises for a piece's own failure."""
    tokens: list[SampledToken] = []
    errors: dict[str, Exception] = {}
    for request_id, piece in _pieces(plan):
        if request_id in errors:
            continue
        try:
            tokens += runner.launch(piece).result().tokens
        except Exception as error:  # whatever it is, it ends this request only
            errors[request_id] = error
    return IsolatedOutput(StepOutput(plan.step_id, tuple(tokens)), errors)


def _pieces(plan: StepPlan) -> Iterator[tuple[str, StepPlan]]:
    # Slots, tables and copies are needed by all, and cost nothing to repeat.
    for row in plan.rows:
        yield row.request_id, replace(plan, rows=(row,), chunks=())
    for chunk in plan.chunks:
        yield chunk.request_id, replace(plan, rows=(), chunks=(chunk,))
