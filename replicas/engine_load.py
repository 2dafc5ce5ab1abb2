"""What an engine tells routers of its load, in frames, replies and pulses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from replicas.checked_fields import Amount, Count, Name
from scheduler.admission import LATER_STEPS

# The time over which `EngineLoad.prompt_share` is a mean: what is so old counts a third.
PROMPT_SHARE_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """State of an engine as the router's policies see it."""

    num_running: Count
    num_queued: Count
    queued_prompt_tokens: Count
    free_blocks: Count  # what a newcomer may use at every step to come, by the projection of all who were admitted
    total_blocks: Count
    step_s: Amount  # moving average of the step time; 0.0 before the first
    prefill_tokens_per_s: Amount = 0.0  # moving average over steps that compute prompts; 0.0 before the first
    # As free_blocks, but from the step on that is so many (scheduler.admission.LATER_STEPS) away; empty: not projected.
    later_free_blocks: Annotated[tuple[Count, ...], Meta(max_length=len(LATER_STEPS))] = ()
    expected_tokens: Count = 0  # a choice that starts now is taken to generate so many; 0: as many as its max_tokens
    slowest_source: Name = ""  # the replica from which KV is read slowest, of those that were measured
    slowest_read_bytes_per_s: Amount = 0.0
    read_source: Name = ""  # likewise one of all of them, another in each load
    read_bytes_per_s: Amount = 0.0
    missing_blocks: Count = 0  # by the projection: more than 0, and somebody gives way sooner or later, or has done so
    is_leaving: bool = False  # the replica takes nothing new, and ends when nobody waits for anything of it
    # Of an engine that may do both phases (`metrics.mixture_clock`): how long its steps of rows alone take, and which
    # part of its time goes to prompts; 0.0: not known, and none.
    row_step_s: Amount = 0.0
    prompt_share: Amount = 0.0
