"""A draft model on a card: as `DraftModel`, but for what only the device knows, and without waiting for it.

The host decides which prompts are read, and where KV lies: for as far as a row may be by now. How far it is, which
drafts have held, and what is still to be read of its output, the loops find in the slots' histories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from replicas.cuda.captured_loops import CapturedLoops
from replicas.cuda.draft_loop import CATCH_UP, CatchUpPass, DraftLoop, LoopParts, row_values
from replicas.cuda.draft_model_runner import DraftModelRunner
from replicas.cuda.graphs import StepGraph
from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.sampling.draw import GREEDY_BELOW
from replicas.speculation.draft_model import PROMPT_TOKENS
from replicas.speculation.draft_model_counts import DraftModelCounts
from replicas.speculation.draft_tables import DraftTables
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from scheduler.plan import BlockCopy, Slice, SlotInit, StepPlan, TableWrite

_ROWS = (1, 4, 16, 64)  # that get loops of their own: a small model's pass takes as long for some rows as for one
# Of a step: a row that has paused for longer comes back over some steps.
_MOST_CATCH_UPS = 4


@dataclass(slots=True)
class _Reading:
    """What is read of prompts in front of a step's drafts, and what the device is told. num_read: by slot."""

    writes: list[TableWrite] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)
    num_read: dict[int, int] = field(default_factory=dict)
    prompts: set[int] = field(default_factory=set)  # that are read in it, by identity
    num_tokens: int = 0


class CardDraftModel:
    """An ExpectingDrafter. `start` on any thread, everything else on one."""

    def __init__(
        self,
        runner: DraftModelRunner,
        served: CudaSlots,
        max_len: int,
        served_vocab_size: int,
        max_drafts: int,
        counts: DraftModelCounts | None = None,
    ) -> None:
        """runner: of the draft model, warm. served: slots of the served model, which are its own, too. The rest as of
        `DraftModel`; max_drafts: of a row. Blocks: captures its loops."""
        self._runner, self._max_len, self._max_drafts = runner, max_len, max_drafts
        self._device = served.state.device
        self._block_size, num_slots = runner.pool.layout.block_size, runner.num_slots
        self._tables = DraftTables(num_slots, runner.pool.num_blocks, self._block_size)
        self._prompts: list[tuple[int, ...]] = [()] * num_slots
        self._num_read = [0] * num_slots  # of the prompts
        self._positions = [0] * num_slots  # how far rows are read, at most
        self._is_sampled, self._is_known = [False] * num_slots, [False] * num_slots
        self._started: deque[SlotInit] = deque()
        self._untold: dict[int, SlotInit] = {}  # of slots whose parameters the runner has not been told of
        self._expected: dict[int, tuple[int, ...]] = {}
        self.counts = counts or DraftModelCounts()
        sizes = (runner.vocab_size, served_vocab_size)
        self._parts = LoopParts(runner.pass_model, served, max_drafts - 1, sizes)
        self._loops = CapturedLoops(_ROWS, num_slots, max_drafts)
        self._capture()

    @torch.inference_mode()
    def _capture(self) -> None:
        self._catch_ups: dict[int, StepGraph[Tensor]] = {}
        memory = torch.cuda.graph_pool_handle()
        for size in reversed(self._loops.sizes):
            reading = CatchUpPass(self._parts, size)
            self._catch_ups[size] = StepGraph(reading.static_input, reading.run, memory, None)
        self._loops.capture(partial(DraftLoop, self._parts), memory, "draft model")

    def start(self, init: SlotInit) -> None:
        self._started.append(init)

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """What counts is in the histories, against which drafts are held."""

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        self._take_started()
        self._reset(slot, prompt_ids)
        if self._is_known[slot]:
            self._expected[slot] = prompt_ids

    @torch.inference_mode()
    def read_ahead(self) -> bool:
        reading = _Reading()
        self._read_expected(reading)
        self._read(reading)
        if reading.chunks and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # neighbours' next step does not wait for many
        return bool(reading.chunks)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        """As the contract has it. Does not wait. Mutates its pool. Good until the next call."""
        self._take_started()
        self._tables.next_turn([row.slot for row in rows])
        reading = _Reading()
        able = [row if self._begin(reading, row) else row._replace(num_drafts=0) for row in rows]
        able = [self._within(row) for row in able]
        self._read_expected(reading)
        self._read(reading)
        most = max(row.num_drafts for row in able)
        if not most:
            return torch.full((len(rows), 0), NO_DRAFT, dtype=torch.int64, device=self._device)
        size = self._loops.size_of(len(rows))
        values = row_values(able, size, self._parts.served.padding_slot).pin_memory()
        for _ in range(self._num_catch_ups(able)):
            self._catch_ups[size].replay(values)
        has_sampled = any(self._is_sampled[row.slot] for row in able if row.num_drafts)
        return self._loops.draft(size, most, has_sampled, values)[: len(rows)]

    def _num_catch_ups(self, rows: Sequence[DraftRow]) -> int:
        """By how far rows are ahead of what is read of them, beyond what drafts explain. Of one that stays behind later
        steps read on. Mutates."""
        drafted = [row for row in rows if row.num_drafts]
        gap = max(row.position - self._positions[row.slot] for row in drafted)
        count = min(-(-gap // CATCH_UP), _MOST_CATCH_UPS) if gap > 1 + self._max_drafts else 0
        for row in drafted:
            read = self._positions[row.slot] + count * CATCH_UP
            self._positions[row.slot] = min(row.position, read) if count else row.position
        return count

    # -- sequences that come and go ----------------------------------------------------------------

    def _take_started(self) -> None:
        """Sequences have taken slots; what was read of their very prompts is kept. Mutates."""
        while self._started:
            init = self._started.popleft()
            slot, prompt_ids = init.slot, init.context.prompt_ids
            self._expected.pop(slot, None)
            if not prompt_ids or self._prompts[slot] is not prompt_ids:
                self._reset(slot, prompt_ids)
            self._untold[slot] = SlotInit(slot, init.choice, init.sampling, None)
            self._is_sampled[slot] = init.sampling.temperature >= GREEDY_BELOW

    def _reset(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """Nothing is there of the sequence that has a slot now. Mutates."""
        self._tables.release(slot)
        self._prompts[slot], self._num_read[slot], self._positions[slot] = prompt_ids, 0, len(prompt_ids)
        is_short = 0 < len(prompt_ids) < self._max_len
        self._is_known[slot] = is_short and max(prompt_ids) < self._runner.vocab_size
        self._untold.pop(slot, None)
        self._expected.pop(slot, None)

    # -- prompts -----------------------------------------------------------------------------------

    def _begin(self, reading: _Reading, row: DraftRow) -> bool:
        """Put what is missing of a row's prompt into this step, as far as there is room: whether it is all read then,
        and so the row may have drafts. Mutates."""
        slot = row.slot
        if not self._is_known[slot] or row.position + 1 >= self._max_len:
            self.counts.beyond_reach += 1
            return False
        if not self._reserve(reading, slot, min(row.position + row.num_drafts, self._max_len)):
            self.counts.no_blocks += 1
            return False
        prompt = self._prompts[slot]
        if self._num_read[slot] < len(prompt):
            self._borrow(reading, slot)
        if self._num_read[slot] < len(prompt) and id(prompt) not in reading.prompts:
            self._feed(reading, slot)
        if self._num_read[slot] < len(prompt):
            self.counts.catching_up += 1
            return False
        return True

    def _within(self, row: DraftRow) -> DraftRow:
        """With no more drafts than the draft model has positions for."""
        return row._replace(num_drafts=max(min(row.num_drafts, self._max_len - 1 - row.position), 0))

    def _read_expected(self, reading: _Reading) -> None:
        """Put prompts of sequences to come into the step, as far as there is room. Mutates."""
        for slot, prompt in list(self._expected.items()):
            if reading.num_tokens >= PROMPT_TOKENS:
                return
            self._tables.keep(slot)
            is_possible = self._reserve(reading, slot, len(prompt))
            if is_possible:
                self._feed(reading, slot)
            if not is_possible or self._num_read[slot] == len(prompt):
                del self._expected[slot]

    def _reserve(self, reading: _Reading, slot: int, num_tokens: int) -> bool:
        """Blocks for so many tokens, if there are enough. Mutates."""
        reserved = self._tables.reserve(slot, num_tokens)
        if reserved is None:
            return False
        write, robbed = reserved
        reading.writes += [] if write is None else [write]
        for other in robbed:
            self._num_read[other], self._positions[other] = 0, len(self._prompts[other])
        return True

    def _borrow(self, reading: _Reading, slot: int) -> None:
        """Copy what another choice of the same request has of the prompt. Mutates."""
        prompt = self._prompts[slot]
        others = [other for other, theirs in enumerate(self._prompts) if theirs is prompt and other != slot]
        source = max(others, key=lambda other: self._num_read[other], default=None)
        # What is read in this very step is there behind it: a later one can copy.
        if source is None or id(prompt) in reading.prompts or self._num_read[source] <= self._num_read[slot]:
            return
        num_read = self._num_read[source]
        num_blocks = -(-num_read // self._block_size)
        pairs = zip(self._tables.table(source)[:num_blocks], self._tables.table(slot), strict=False)
        reading.copies += [BlockCopy(*pair) for pair in pairs]
        self._num_read[slot] = reading.num_read[slot] = num_read

    def _feed(self, reading: _Reading, slot: int) -> None:
        """Some of a prompt's tokens, as many as the step has room for. Mutates."""
        prompt, start = self._prompts[slot], self._num_read[slot]
        end = min(len(prompt), start + PROMPT_TOKENS - reading.num_tokens)
        if end > start:
            reading.chunks.append(Slice.of_prompt("", slot, start, prompt[start:end]))
            reading.num_tokens += end - start
            self._num_read[slot] = reading.num_read[slot] = end
        reading.prompts.add(id(prompt))

    def _read(self, reading: _Reading) -> None:
        """Run it, and tell the device. Mutates."""
        inits = list(self._untold.values())
        self._untold.clear()
        self._runner.take(inits, reading.writes, reading.copies)
        if reading.chunks:
            self.counts.prompt_tokens += reading.num_tokens
            self._runner.launch(StepPlan(0, (), (), (), tuple(reading.chunks)))
        told = reading.num_read | {init.slot: self._num_read[init.slot] for init in inits}
        if told:
            slots, values = numbers_to_device([list(told), list(told.values())], self._device)
            self._parts.kv.known.index_copy_(0, slots, values)
            self._parts.kv.ahead.index_fill_(0, slots, NO_DRAFT)
