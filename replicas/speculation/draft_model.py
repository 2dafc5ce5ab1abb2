"""A small model of the same tokenizer that drafts for the served one, in a KV pool of its own.

It draws its drafts with the very noise with which the served model will draw at those positions, by the same
parameters and rules: where its probabilities are the served model's, its drafts are all accepted, at any temperature.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.speculation.draft_tables import DraftTables
from replicas.speculation.drafter import DraftRow
from scheduler.plan import BlockCopy, SampleTarget, Slice, SlotInit, StepPlan, TableWrite

logger = logging.getLogger(__name__)

# Tokens of prompts in one step, beside its drafts: a prompt is caught up over some steps, without drafts meanwhile, so
# that neighbours' tokens are not late.
PROMPT_TOKENS = 256


class DraftRunner(Protocol):
    """What computes the draft model: a ModelRunner that nobody else has."""

    @property
    def num_slots(self) -> int: ...

    def forward(self, plan: StepPlan) -> Any: ...

    def choose(self, forwarded: Any) -> Any: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def know(self, slot: int, start: int, ids: NDArray[np.int32]) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """max_len: of a sequence, in tokens. vocab_size: of the draft model; served_vocab_size: of the served one, which
    may have padded its table to another size.
    """

    num_blocks: int
    block_size: int
    max_len: int
    vocab_size: int
    served_vocab_size: int


@dataclass(slots=True)
class DraftCounts:
    """Since the start. Rows without drafts, by their cause; a row counts in each step anew."""

    prompt_tokens: int = 0  # tokens of sequences that were computed, drafts apart
    no_blocks: int = 0  # the pool was full
    catching_up: int = 0  # the draft model had not read all of it yet
    beyond_reach: int = 0  # too long for it, or with a token that it does not know
    failed: int = 0  # the draft model's own computing failed


@dataclass(slots=True)
class _Kv:
    """What the pool has of a slot's sequence: of its first num_known tokens, and behind them of drafts."""

    num_known: int = 0
    ahead: list[int] = field(default_factory=list)

    def settle(self, ids: NDArray[np.int32]) -> None:
        """The sequence is this now: what is behind the first wrong draft is no longer there. The last token is always
        fed again, as what follows it is asked for. Mutates."""
        for token in self.ahead:
            if self.num_known >= len(ids) or ids[self.num_known] != token:
                break
            self.num_known += 1
        self.ahead.clear()
        self.num_known = min(self.num_known, len(ids) - 1)


@dataclass(slots=True)
class _Chain:
    """A row that is drafted for in this step. index: among the rows. length: of its sequence, in tokens."""

    index: int
    row: DraftRow
    length: int
    num_drafts: int


@dataclass(slots=True)
class _CatchUp:
    """The first pass of a step while it is put together: whatever of the sequences was not computed yet."""

    inits: list[SlotInit] = field(default_factory=list)
    writes: list[TableWrite] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    known: list[tuple[int, int, NDArray[np.int32]]] = field(default_factory=list)
    rows: list[Slice] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)
    of_rows: list[_Chain] = field(default_factory=list)
    of_chunks: list[_Chain] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)  # that are computed in it, by identity
    num_tokens: int = 0  # of the chunks

    @property
    def chains(self) -> list[_Chain]:
        """Those whose first draft it gives, in the order of the plan's samples."""
        return self.of_rows + self.of_chunks


class DraftModel:
    """A Drafter. For the runner's thread alone."""

    def __init__(self, runner: DraftRunner, history: Callable[[int], NDArray[np.int32]], limits: DraftLimits) -> None:
        """history: the tokens of a slot's sequence so far, prompt and output, of which there is at least one."""
        self._runner = runner
        self._history = history
        self._limits = limits
        self._tables = DraftTables(runner.num_slots, limits.num_blocks, limits.block_size)
        self._kv = [_Kv() for _ in range(runner.num_slots)]
        self._prompts: list[tuple[int, ...]] = [()] * runner.num_slots
        self._fresh: dict[int, SlotInit] = {}  # of slots that the runner has not been told of
        self.counts = DraftCounts()

    def start(self, init: SlotInit) -> None:
        """A sequence takes a slot. Mutates; computes nothing."""
        self._take(init.slot, init.context.prompt_ids)
        # Nobody asks the draft model what it thought of its tokens.
        self._fresh[init.slot] = replace(init, sampling=replace(init.sampling, num_logprobs=None))

    def accepted(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Nothing to do: what counted is in the history, against which the drafts are held."""

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        """int64 [len(rows), the most drafts of a row]; -1 where there is none. Mutates its pool. Blocks for it.

        Raises nothing: where the draft model fails there are no drafts, and the step goes on.
        """
        width = max((row.num_drafts for row in rows), default=0)
        drafts = torch.full((len(rows), width), -1, dtype=torch.int64)
        self._tables.next_turn([row.slot for row in rows])
        try:
            self._fill(drafts, rows)
        except Exception as error:
            self.counts.failed += len(rows)
            extra = {"event": "draft_failed", "rows": len(rows), "reason": str(error)}
            logger.warning("the draft model failed: no drafts in this step (%s)", error, extra=extra)
            for row in rows:  # whatever was written by then counts for nothing
                self._kv[row.slot] = _Kv()
            return torch.full_like(drafts, -1)
        return drafts

    def _fill(self, drafts: Tensor, rows: Sequence[DraftRow]) -> None:
        """Mutates drafts, and the pool."""
        width = drafts.shape[1]
        first = _CatchUp()
        for index, row in enumerate(rows):
            self._begin(first, index, row)
        chains, tokens = first.chains, self._catch_up(first)
        for place in range(width):
            going_on: list[_Chain] = []
            for chain, token in zip(chains, tokens, strict=True):
                if token >= 0:
                    drafts[chain.index, place] = token
                    going_on += [chain] if place + 1 < chain.num_drafts else []
            if not going_on:
                break
            chains, tokens = going_on, self._next(going_on, drafts[:, place].tolist(), place)

    def _begin(self, step: _CatchUp, index: int, row: DraftRow) -> None:
        """Put what is missing of a row's sequence into the step, as far as there is room. Mutates."""
        ids, kv, limits = self._history(row.slot), self._kv[row.slot], self._limits
        kv.settle(ids)
        num_drafts = min(row.num_drafts, limits.max_len - len(ids))
        if num_drafts <= 0 or int(ids[kv.num_known :].max()) >= limits.vocab_size:
            self.counts.beyond_reach += num_drafts <= 0 < row.num_drafts or num_drafts > 0
            return
        reserved = self._tables.reserve(row.slot, len(ids) + num_drafts - 1)
        if reserved is None:
            self.counts.no_blocks += 1
            return
        write, robbed = reserved
        for slot in robbed:
            self._kv[slot] = _Kv()
        step.writes += [] if write is None else [write]
        if (init := self._fresh.pop(row.slot, None)) is not None:
            step.inits.append(init)
            step.known.append((row.slot, 0, ids))
        else:
            step.known.append((row.slot, kv.num_known, ids[kv.num_known :]))
        if kv.num_known == 0 and not self._borrow(step, row.slot, len(ids)):
            self.counts.catching_up += 1
            return
        chain = _Chain(index, row, len(ids), num_drafts)
        num_missing = len(ids) - kv.num_known
        if num_missing == 1:
            step.rows.append(Slice("", row.choice, row.slot, kv.num_known))
            step.of_rows.append(chain)
        elif self._feed(step, row.slot, row.choice, ids):
            step.of_chunks.append(chain)
        else:
            self.counts.catching_up += 1

    def _borrow(self, step: _CatchUp, slot: int, length: int) -> bool:
        """Copy what another choice of the same request has of the prompt. False: it is computing it just now, and a
        later step can copy. Mutates."""
        prompt = self._prompts[slot]
        if not prompt:
            return True
        if id(prompt) in step.prompts:
            return False
        able = [other for other, theirs in enumerate(self._prompts) if theirs is prompt and other != slot]
        source = max(able, key=lambda other: self._kv[other].num_known, default=None)
        if source is None:
            return True
        num_known = min(self._kv[source].num_known, len(prompt), length - 1)
        num_blocks = -(-num_known // self._limits.block_size)
        pairs = zip(self._tables.table(source)[:num_blocks], self._tables.table(slot), strict=False)
        step.copies += [BlockCopy(*pair) for pair in pairs]
        self._kv[slot].num_known = num_known
        return True

    def _feed(self, step: _CatchUp, slot: int, choice: int, ids: NDArray[np.int32]) -> bool:
        """Several tokens of a sequence, as many as the step has room for: whether that is all. Mutates."""
        kv = self._kv[slot]
        count = min(len(ids) - kv.num_known, PROMPT_TOKENS - step.num_tokens)
        if count <= 0:
            return False
        end = kv.num_known + count
        targets = (SampleTarget(slot, choice),) if end == len(ids) else ()
        step.chunks.append(Slice.of_prompt("", slot, kv.num_known, tuple(ids[kv.num_known : end].tolist()), targets))
        step.num_tokens += count
        step.prompts.add(id(self._prompts[slot]))
        kv.num_known = end if end < len(ids) else end - 1
        return bool(targets)

    def _catch_up(self, step: _CatchUp) -> list[int]:
        """Run it: a token for each of its chains. Mutates."""
        if step.inits or step.writes or step.copies:
            self._runner.launch(StepPlan(0, tuple(step.inits), tuple(step.writes), tuple(step.copies), ()))
        for known in step.known:
            self._runner.know(*known)
        self.counts.prompt_tokens += step.num_tokens + len(step.rows)
        tokens = self._draw([*step.rows, *step.chunks])
        for chain in step.chains:
            self._kv[chain.row.slot].num_known = chain.length
        return tokens

    def _next(self, chains: Sequence[_Chain], last_tokens: Sequence[int], place: int) -> list[int]:
        """The draft behind the one that each chain has at this place. Mutates."""
        for chain in chains:
            self._kv[chain.row.slot].ahead.append(last_tokens[chain.index])
        return self._draw([Slice("", c.row.choice, c.row.slot, c.length + place) for c in chains])

    def _draw(self, slices: Sequence[Slice]) -> list[int]:
        """A token for each that they sample; below 0 where there is none."""
        if not slices:
            return []
        plan = StepPlan(0, (), (), (), tuple(slices))
        if self._limits.vocab_size == self._limits.served_vocab_size:
            handle = self._runner.launch(plan)
        else:
            forwarded = self._runner.forward(plan)
            handle = self._runner.choose(replace(forwarded, logits=self._fitted(forwarded.logits)))
        return [token.token_id for token in handle.result().tokens]

    def _fitted(self, logits: Tensor) -> Tensor:
        """float32 [R, of the served model]: rules name tokens of that one, and only those are drafts."""
        missing = self._limits.served_vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._limits.served_vocab_size].contiguous()
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def _take(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A slot is for this prompt now; what was computed of this very one is kept. Mutates."""
        if prompt_ids and self._prompts[slot] is prompt_ids:
            kv = self._kv[slot]
            self._kv[slot] = _Kv(min(kv.num_known, len(prompt_ids)))
            return
        self._tables.release(slot)
        self._kv[slot] = _Kv()
        self._prompts[slot] = prompt_ids
