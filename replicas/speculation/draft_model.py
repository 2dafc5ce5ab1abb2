"""A small model of the same tokenizer that drafts for the served one, in a KV pool of its own.

It draws its drafts with the very noise with which the served model will draw at those positions, by the same
parameters and rules: where its probabilities are the served model's, its drafts are all accepted, at any temperature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replicas.model.model_runner import ModelRunner
from replicas.speculation.draft_model_counts import DraftModelCounts
from replicas.speculation.draft_step import CatchUp, Chain, DraftedKv
from replicas.speculation.draft_tables import DraftTables
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from replicas.speculation.history import TokenHistory, TokenIds
from scheduler.plan import BlockCopy, SampleTarget, Slice, SlotInit, StepPlan

# Tokens of prompts in one step, beside its drafts: a prompt is caught up over some steps, without drafts meanwhile, so
# that neighbours' tokens are not late.
PROMPT_TOKENS = 256


class DraftModel:
    """A Drafter. `start` on any thread, everything else on one."""

    def __init__(
        self,
        runner: ModelRunner,
        history: TokenHistory,
        max_len: int,
        vocab_size: int,
        served_vocab_size: int,
        counts: DraftModelCounts | None = None,
    ) -> None:
        """runner: of the draft model, which nobody else has; its slots are the served model's. max_len: of a sequence,
        in tokens, for the draft model. vocab_size: of its tables; served_vocab_size: of the served model's, which may
        be padded to another size. counts: that somebody else reads, too.
        """
        self._runner, self._history, self._max_len = runner, history, max_len
        self._vocab_size, self._served_vocab_size = vocab_size, served_vocab_size
        self._block_size = runner.pool.layout.block_size
        self._tables = DraftTables(runner.num_slots, runner.pool.num_blocks, self._block_size)
        self._kv = [DraftedKv() for _ in range(runner.num_slots)]
        self._prompts: list[tuple[int, ...]] = [()] * runner.num_slots
        self._started: deque[SlotInit] = deque()
        self._untold: dict[int, SlotInit] = {}  # of slots that the runner has not been told of
        self._expected: dict[int, tuple[int, ...]] = {}  # prompts of sequences to come, by slot
        self.counts = counts or DraftModelCounts()

    def start(self, init: SlotInit) -> None:
        self._started.append(init)

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A sequence with this prompt will take a slot when its KV is here: the prompt can be read meanwhile. Not for
        slots of other lanes' threads. Mutates."""
        self._take_started()
        self._reset(slot, prompt_ids)
        if len(prompt_ids) < self._max_len and max(prompt_ids, default=0) < self._vocab_size:
            self._expected[slot] = prompt_ids

    @torch.inference_mode()
    def read_ahead(self) -> bool:
        """Read a part of the prompts that are expected; false if nothing is left of them. Blocks. Mutates its pool."""
        step = CatchUp()
        self._read_expected(step)
        self._catch_up(step)
        return bool(step.chunks)

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """What counts is in the history, against which drafts are held."""

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        """As the contract has it. Blocks until the drafts are there. Mutates its pool."""
        self._take_started()
        width = max((row.num_drafts for row in rows), default=0)
        drafts = torch.full((len(rows), width), NO_DRAFT, dtype=torch.int64)
        self._tables.next_turn([row.slot for row in rows])
        first = CatchUp()
        for index, row in enumerate(rows):
            self._begin(first, index, row)
        self._read_expected(first)
        chains, tokens = first.chains, self._catch_up(first)
        for place in range(width):
            going_on: list[Chain] = []
            for chain, token in zip(chains, tokens, strict=True):
                if token >= 0:
                    drafts[chain.index, place] = token
                    going_on += [chain] if place + 1 < chain.num_drafts else []
            if not going_on:
                break
            chains, tokens = going_on, self._next(going_on, drafts[:, place].tolist(), place)
        return drafts

    def _take_started(self) -> None:
        """Sequences have taken slots; what was computed of their very prompts is kept. Mutates."""
        while self._started:
            init = self._started.popleft()
            slot, prompt_ids = init.slot, init.context.prompt_ids
            self._expected.pop(slot, None)
            if prompt_ids and self._prompts[slot] is prompt_ids:
                self._kv[slot] = DraftedKv(min(self._kv[slot].num_known, len(prompt_ids)))
            else:
                self._reset(slot, prompt_ids)
            # Nobody asks the draft model what it thought of its tokens.
            self._untold[slot] = replace(init, sampling=replace(init.sampling, num_logprobs=None))

    def _reset(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """Nothing is there of the sequence that has a slot now. Mutates."""
        self._tables.release(slot)
        self._kv[slot] = DraftedKv()
        self._prompts[slot] = prompt_ids
        self._untold.pop(slot, None)
        self._expected.pop(slot, None)

    # -- what it has not read of the sequences yet -------------------------------------------------

    def _begin(self, step: CatchUp, index: int, row: DraftRow) -> None:
        """Put what is missing of a row's sequence into the step, as far as there is room. Mutates."""
        ids, kv = self._history.sequence(row.slot), self._kv[row.slot]
        kv.settle(ids)
        num_drafts = min(row.num_drafts, self._max_len - len(ids))
        if num_drafts <= 0 or int(ids[kv.num_known :].max()) >= self._vocab_size:
            self.counts.beyond_reach += 1
            return
        if not self._reserve(step, row.slot, len(ids) + num_drafts - 1):
            self.counts.no_blocks += 1
            return
        self._tell(step, row.slot, ids)
        if kv.num_known == 0 and not self._borrow(step, row.slot, len(ids)):
            self.counts.catching_up += 1
            return
        chain = Chain(index, row, len(ids), num_drafts)
        if len(ids) - kv.num_known == 1:
            step.rows.append(Slice("", row.choice, row.slot, kv.num_known))
            step.of_rows.append(chain)
        elif self._feed(step, row, ids):
            step.of_chunks.append(chain)
        else:
            self.counts.catching_up += 1

    def _read_expected(self, step: CatchUp) -> None:
        """Put prompts of sequences to come into the step, as far as there is room. Mutates."""
        for slot, prompt_ids in list(self._expected.items()):
            kv = self._kv[slot]
            end = min(len(prompt_ids), kv.num_known + PROMPT_TOKENS - step.num_tokens)
            if end <= kv.num_known:
                return
            self._tables.keep(slot)
            is_possible = self._reserve(step, slot, len(prompt_ids))
            if is_possible:
                step.chunks.append(Slice.of_prompt("", slot, kv.num_known, prompt_ids[kv.num_known : end]))
                step.num_tokens += end - kv.num_known
                kv.num_known = end
            if not is_possible or end == len(prompt_ids):
                del self._expected[slot]

    def _reserve(self, step: CatchUp, slot: int, num_tokens: int) -> bool:
        """Blocks for so many tokens, if there are enough. Mutates."""
        reserved = self._tables.reserve(slot, num_tokens)
        if reserved is None:
            return False
        write, robbed = reserved
        step.writes += [] if write is None else [write]
        for other in robbed:
            self._kv[other] = DraftedKv()
        return True

    def _tell(self, step: CatchUp, slot: int, ids: TokenIds) -> None:
        """What the draft model's runner is to know of the sequence, beyond its own drafts. Mutates."""
        start = self._kv[slot].num_known
        if (init := self._untold.pop(slot, None)) is not None:
            step.inits.append(init)
            start = 0
        step.known.append((slot, start, ids[start:]))

    def _borrow(self, step: CatchUp, slot: int, length: int) -> bool:
        """Copy what another choice of the same request has of the prompt. False: it is computing it just now, and a
        later step can copy. Mutates."""
        prompt = self._prompts[slot]
        if not prompt:
            return True
        if id(prompt) in step.prompts:
            return False
        others = [other for other, theirs in enumerate(self._prompts) if theirs is prompt and other != slot]
        source = max(others, key=lambda other: self._kv[other].num_known, default=None)
        if source is not None:
            num_known = min(self._kv[source].num_known, len(prompt), length - 1)
            num_blocks = -(-num_known // self._block_size)
            pairs = zip(self._tables.table(source)[:num_blocks], self._tables.table(slot), strict=False)
            step.copies += [BlockCopy(*pair) for pair in pairs]
            self._kv[slot].num_known = num_known
        return True

    def _feed(self, step: CatchUp, row: DraftRow, ids: TokenIds) -> bool:
        """Several tokens of a sequence, as many as the step has room for: whether that is all. Mutates."""
        slot, kv = row.slot, self._kv[row.slot]
        end = min(len(ids), kv.num_known + PROMPT_TOKENS - step.num_tokens)
        if end <= kv.num_known:
            return False
        is_all = end == len(ids)
        targets = (SampleTarget(slot, row.choice),) if is_all else ()
        step.chunks.append(Slice.of_prompt("", slot, kv.num_known, tuple(ids[kv.num_known : end].tolist()), targets))
        step.num_tokens += end - kv.num_known
        if kv.num_known < len(self._prompts[slot]):
            step.prompts.add(id(self._prompts[slot]))
        kv.num_known = end
        return is_all

    def _catch_up(self, step: CatchUp) -> list[int]:
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

    # -- what it drafts ----------------------------------------------------------------------------

    def _next(self, chains: Sequence[Chain], last_tokens: Sequence[int], place: int) -> list[int]:
        """The draft behind the one that each chain has at this place. Mutates."""
        for chain in chains:
            self._kv[chain.row.slot].ahead.append(last_tokens[chain.index])
        return self._draw([Slice("", c.row.choice, c.row.slot, c.length + place) for c in chains])

    def _draw(self, slices: Sequence[Slice]) -> list[int]:
        """A token for each that they sample; below 0 where there is none."""
        if not slices:
            return []
        plan = StepPlan(0, (), (), (), tuple(slices))
        if self._vocab_size == self._served_vocab_size:
            return self._runner.launch(plan).read_tokens()
        forwarded = self._runner.forward(plan)
        if forwarded.logits is not None:
            forwarded = replace(forwarded, logits=self._fitted(forwarded.logits))
        return self._runner.choose(forwarded).read_tokens()

    def _fitted(self, logits: Tensor) -> Tensor:
        """float32 [R, V of the served model]: rules name that one's tokens, and only those are drafts."""
        missing = self._served_vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._served_vocab_size].contiguous()
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
