"""Plans made by hand: a step of exactly the batch, context and sampling that is to be timed."""

from __future__ import annotations

from scheduler.memory_budget import num_blocks_for
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def set_up(batch: int, context: int, block_size: int, sampling: SamplingParams = GREEDY) -> StepPlan:
    """One step that gives `batch` slots a table for `context` cached tokens and one more, and feeds each a token."""
    num_blocks = num_blocks_for(context + 1, block_size)
    tables = [tuple(range(slot * num_blocks, (slot + 1) * num_blocks)) for slot in range(batch)]
    return StepPlan(
        step_id=0,
        slot_inits=tuple(SlotInit(slot, 0, sampling, last_token=1_000 + slot) for slot in range(batch)),
        table_writes=tuple(TableWrite(slot, 0, blocks) for slot, blocks in enumerate(tables)),
        copies=(),
        slices=decode_rows(batch, context),
    )


def decode_rows(batch: int, context: int) -> tuple[Slice, ...]:
    return tuple(Slice(f"request-{slot}", 0, slot, context) for slot in range(batch))


def decode_step(batch: int, context: int) -> StepPlan:
    """A step of slots that are set up. It may be repeated: it writes the same positions."""
    return StepPlan(0, (), (), (), decode_rows(batch, context))


def prefill_steps(token_ids: list[int], step_tokens: int, block_size: int) -> list[StepPlan]:
    """A prompt in slot 0, in pieces of step_tokens, sampling one token at its end."""
    blocks = tuple(range(num_blocks_for(len(token_ids), block_size)))
    plans = []
    for start in range(0, len(token_ids), step_tokens):
        ids = tuple(token_ids[start : start + step_tokens])
        is_last = start + len(ids) == len(token_ids)
        chunk = Slice.of_prompt("prompt", 0, start, ids, (SampleTarget(0, 0),) if is_last else ())
        inits = () if start else (SlotInit(0, 0, GREEDY, None),)
        writes = () if start else (TableWrite(0, 0, blocks),)
        plans.append(StepPlan(0, inits, writes, (), (chunk,)))
    return plans
