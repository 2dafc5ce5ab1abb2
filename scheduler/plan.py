"""Frozen plans: what one engine step does. The scheduler makes them, the model runner applies them.

A plan never carries a token that an earlier, perhaps unfinished, step samples: a running sequence's slice names a
slot, and the runner keeps each slot's last token, and its position (on the GPU: without leaving it). So step n+1 can be
planned, and launched, before the tokens of step n are known, and how many of them count.
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
    output. stop_token_ids: what min_tokens holds back. predicted_ids: what the client expects the output to be like:
    drafts are looked for there, too; no rule looks at it.
    """

    prompt_ids: tuple[int, ...] = ()
    output_start: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    predicted_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence takes a runner slot. Applied before anything else of the plan."""

    slot: int
    choice: int
    sampling: SamplingParams
    # The token its first row feeds, when it is known here (it came with the handoff); else None.
    last_token: int | None
    context: RuleContext = RuleContext()
    # Position of last_token, which is then the slot's LENGTH. None: not said; then its next rows are where plans say.
    last_position: int | None = None
    may_draft: bool = False  # whether the runner may make drafts for it; else nothing is kept that they are made by


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


class BlockSwap(NamedTuple):
    """One whole KV block between the device's pool and host memory: out, or back in. A tuple: steps have hundreds."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """Where a token sampled from the last position of a prompt goes: one per choice of the request."""

    slot: int
    choice: int


class Slice(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, computed in one piece: a chunk of a prompt, or a row of a
    running sequence: its last token, and behind it those that are guessed to follow, if any are.

    Guesses are either known here, and then carried (token_ids), or made by the runner: its drafts, of which the plan
    has the number only. (What a row's grammar forces, its engine puts in their place before it launches.) Where drafts
    of the sequence are in flight, it is not known how many of them count: `start` is then the furthest that the row may
    lie, and it lies at its slot's LENGTH, the position of its last token.

    A tuple, like SampledToken: one is made for each token there is, in a third of the time.
    """

    request_id: str
    choice: int
    slot: int
    start: int  # position of its first token; its KV is written there
    num_tokens: int = 1
    num_sampled: int = 1  # at so many of its last positions a token is sampled, each for the position behind
    # Its last tokens, as far as they are known here: of a prompt all of them, of a row the guessed ones. Those in front
    # of them are the slot's own: the last one that was sampled.
    token_ids: tuple[int, ...] = ()
    # Other choices of a prompt that it ends: for each a token is sampled at its last position, too.
    forks: tuple[SampleTarget, ...] = ()
    # Where the prompt's log-probabilities are asked for: prompt tokens start + 1, start + 2, ..., each that a token of
    # this chunk precedes. None: not asked for.
    scored_ids: tuple[int, ...] | None = None
    # Of its tokens the last ones, at most: so many drafts the runner may put there. Fewer are no fault, nor is none.
    num_drafts: int = 0

    @classmethod
    def of_prompt(
        cls,
        request_id: str,
        slot: int,
        start: int,
        token_ids: tuple[int, ...],
        targets: tuple[SampleTarget, ...] = (),
        scored_ids: tuple[int, ...] | None = None,
    ) -> Slice:
        """A chunk. targets: of the choices, `slot`'s own first; none unless the chunk ends the prompt."""
        choice, num_sampled = (targets[0].choice, 1) if targets else (0, 0)
        num_tokens = len(token_ids)
        return cls(request_id, choice, slot, start, num_tokens, num_sampled, token_ids, targets[1:], scored_ids)

    @property
    def is_prompt(self) -> bool:
        """Whether it needs no token of the slot's."""
        return len(self.token_ids) == self.num_tokens

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.num_tokens

    @property
    def most_sampled(self) -> int:
        """Tokens that it samples at its own positions, or would, had all drafts been there that were planned: by these
        numbers rows of logits are counted that have masks."""
        return max(self.num_sampled, 1 + self.num_drafts) if self.num_sampled else 0

    @property
    def sampled_choices(self) -> tuple[int, ...]:
        """Of each token that it samples, in their order: those of its own positions, then its forks'."""
        return (self.choice,) * self.num_sampled + tuple([fork.choice for fork in self.forks])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. Applied in this order: slot_inits, table_writes, swap_outs, swap_ins, copies (a block
    may be copied that has just come back), then one forward pass, unless the plan is empty: then it only moves blocks.
    fetches and saves: any time behind the swaps of the steps before it, in this order.
    """

    step_id: int
    slot_inits: tuple[SlotInit, ...]
    table_writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    slices: tuple[Slice, ...]  # those of running sequences first
    swap_outs: tuple[BlockSwap, ...] = ()
    swap_ins: tuple[BlockSwap, ...] = ()
    # Cached blocks, beside the pass: those that come back are computed from only when this step is committed, and those
    # that go out nobody writes into before, or their copies are never used.
    fetches: tuple[BlockSwap, ...] = ()
    saves: tuple[BlockSwap, ...] = ()
    has_drafts: bool = False  # whether some row may have drafts; false: none has

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.slices

    @property
    def num_rows(self) -> int:
        """How many of its slices, the first ones, are of running sequences. O(the others)."""
        num_rows = len(self.slices)
        while num_rows and self.slices[num_rows - 1].is_prompt:
            num_rows -= 1
        return num_rows

    @property
    def rows(self) -> tuple[Slice, ...]:
        """Those of running sequences."""
        return self.slices[: self.num_rows]

    @property
    def chunks(self) -> tuple[Slice, ...]:
        """Those of prompts."""
        return self.slices[self.num_rows :]

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])


class SampledToken(NamedTuple):
    """One token that a step produced."""

    request_id: str
    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class Accepted(NamedTuple):
    """Of a slice with guessed tokens: how many of the tokens that it sampled count. Each stands behind right guesses
    only; those behind the first wrong one are no tokens of the sequence.
    """

    request_id: str
    choice: int
    num_accepted: int  # at least 1: the first one stands behind no guess
    num_sampled: int  # as planned: 1 + its guesses, or the most drafts that there could have been
    num_drafted: int = 0  # drafts that there were


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the runner read back from one step: the tokens of its slices that count, in plan order, a slice's in the
    order of its positions.

    prompts: what it thought of the chunks' tokens, where that was asked for. accepted: of each slice with guesses.
    damaged: of its swap_ins and fetches those that brought something else than once went out.
    """

    step_id: int
    tokens: tuple[SampledToken, ...]
    prompts: tuple[PromptLogprobs, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    damaged: tuple[BlockSwap, ...] = ()
