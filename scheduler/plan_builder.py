"""Collects what the next step must do before it computes, and numbers the steps."""

from __future__ import annotations

from scheduler.plan import BlockCopy, BlockSwap, Slice, SlotInit, StepPlan, TableWrite


class PlanBuilder:
    """Mutable scratch of the plan being made. What is noted while there is nothing to compute waits for the next."""

    def __init__(self) -> None:
        self.next_step_id = 0
        self._slot_inits: list[SlotInit] = []
        self._table_writes: list[TableWrite] = []
        self._copies: list[BlockCopy] = []
        self._swap_outs: list[BlockSwap] = []
        self._swap_ins: list[BlockSwap] = []
        self._fetches: list[BlockSwap] = []
        self._saves: list[BlockSwap] = []

    def init_slot(self, slot_init: SlotInit) -> None:
        self._slot_inits.append(slot_init)

    def write_table(self, slot: int, start: int, block_ids: tuple[int, ...]) -> None:
        self._table_writes.append(TableWrite(slot, start, block_ids))

    def copy_block(self, source: int, destination: int) -> None:
        self._copies.append(BlockCopy(source, destination))

    def swap_out(self, swaps: tuple[BlockSwap, ...]) -> None:
        self._swap_outs += swaps

    def swap_in(self, swaps: tuple[BlockSwap, ...]) -> None:
        self._swap_ins += swaps

    def fetch(self, swaps: tuple[BlockSwap, ...]) -> None:
        self._fetches += swaps

    def save(self, swaps: tuple[BlockSwap, ...]) -> None:
        self._saves += swaps

    def abandon(self) -> None:
        """The plan being made is given up, and its number with it. Mutates.

        Its block copies and swaps must not run: their destinations may have other owners when the next plan runs. Slot
        inits and table writes may: whoever takes a slot later notes its own behind them.
        """
        self._copies, self._swap_outs, self._swap_ins, self._fetches, self._saves = [], [], [], [], []
        self.next_step_id += 1

    def forget(self, slots: frozenset[int]) -> None:
        """Whoever noted something of these slots is over. Mutates.

        Where another lane gives a slot away next, what was noted here would not come before that, but some time.
        """
        self._slot_inits = [init for init in self._slot_inits if init.slot not in slots]
        self._table_writes = [write for write in self._table_writes if write.slot not in slots]

    def build(self, rows: list[Slice], chunks: list[Slice], has_drafts: bool = False) -> StepPlan | None:
        """The plan of the next step, or None when there is nothing to do. Mutates: starts a new scratch.

        rows: of running sequences, with drafts or without; chunks: of prompts.
        """
        if not (rows or chunks or self._swap_outs or self._swap_ins or self._fetches or self._saves):
            return None
        plan = StepPlan(
            step_id=self.next_step_id,
            slot_inits=tuple(self._slot_inits),
            table_writes=tuple(self._table_writes),
            copies=tuple(self._copies),
            slices=(*rows, *chunks),
            swap_outs=tuple(self._swap_outs),
            swap_ins=tuple(self._swap_ins),
            fetches=tuple(self._fetches),
            saves=tuple(self._saves),
            has_drafts=has_drafts and bool(rows),
        )
        self.next_step_id += 1
        self._slot_inits, self._table_writes, self._copies = [], [], []
        self._swap_outs, self._swap_ins, self._fetches, self._saves = [], [], [], []
        return plan
