"""Frozen plans: what one engine step does. The scheduler makes them, the model runner applies them.

A plan never carries a token that an earlier, perhaps unfinished, step samples: a decode row names a
slot, and the runner keeps each slot's last token (on the GPU: without leaving it). So step n+1 can be
planned, and launched, before the tokens of step n are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What rules of token choice look at besides the logits. Tokens that are sampled later the runner adds itself.

    output_start: position of the first generated token: the prompt's length, but for a replay, whose prompt ends with
    output. stop_token_ids: what min_tokens holds back.
    """

    prompt_ids: tuple[int, ...] = ()
    output_start: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence takes a runner slot. Applied before anything else of the plan."""

    slot: int
    choice: int
    sampling: SamplingParams
    # The token its first decode row feeds, when it is known here (it came with the handoff); else None.
    last_token: int | None
    context: RuleContext = RuleContext()


@dataclass(frozen=True, slots=True)
class TableWrite:
    """block_table[slot, start : start + len(block_ids)] = block_ids."""

    slot: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole KV block (all layers) before the step computes: copy-on-write of a forked sequence."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """One whole KV block between the device's pool and host memory: out, or back in."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """Where a token sampled from the last position of a prompt goes: one per choice of the request."""

    slot: int
    choice: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(token_ids)) of a prompt, computed in one piece."""

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    # Empty unless this chunk ends the prompt.
    targets: tuple[SampleTarget, ...]
    # Where the prompt's log-probabilities are asked for: prompt tokens start + 1, start + 2, ..., each that a token of
    # this chunk precedes. None: not asked for.
    scored_ids: tuple[int, ...] | None = None


class DecodeRow(NamedTuple):
    """One token of one running sequence: feed the slot's last token, sample the next one.

    A tuple, like SampledToken: one is made for each token there is, in a third of the time.
    """

    request_id: str
    choice: int
    slot: int
    # Position of the token that is fed; its KV is written there. The sampled token has position + 1.
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. Applied in this order: slot_inits, table_writes, swap_outs, swap_ins, copies (a block
    may be copied that has just come back), then one forward pass, unless the plan is empty: then it only moves blocks.
    """

    step_id: int
    slot_inits: tuple[SlotInit, ...]
    table_writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    chunks: tuple[PrefillChunk, ...]
    rows: tuple[DecodeRow, ...]
    swap_outs: tuple[BlockSwap, ...] = ()
    swap_ins: tuple[BlockSwap, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.chunks and not self.rows

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class SampledToken(NamedTuple):
    """One token that a step produced."""

    request_id: str
    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the runner read back from one step: tokens of its rows, then of its chunks' targets, in plan order.

    prompts: what it thought of the chunks' tokens, where that was asked for.
    """

    step_id: int
    tokens: tuple[SampledToken, ...]
    prompts: tuple[PromptLogprobs, ...] = ()
