"""Running sequences: one row each per step, growth by blocks, copy-on-write, and what a sampled token means.

Tokens are planned ahead of being known (design law 4): `num_planned` runs in front of `num_known` by the
engine's lag. A sequence that ends by a stop token leaves rows in flight behind it; their tokens are
surplus, counted and dropped. One that ends by length leaves none, since that end is planned.
"""

from __future__ import annotations

from scheduler.block_allocator import BlockAllocator
from scheduler.outcome import TokenEvent
from scheduler.plan import DecodeRow, SampledToken
from scheduler.plan_builder import PlanBuilder
from scheduler.request import Request, Sequence


class DecodeBatcher:
    """The running batch of one engine."""

    def __init__(self, allocator: BlockAllocator, builder: PlanBuilder, block_size: int) -> None:
        self._allocator = allocator
        self._builder = builder
        self._block_size = block_size
        self._running: dict[str, Request] = {}
        self.num_forwarded_tokens = 0  # rows whose token counted
        self.num_surplus_tokens = 0  # sampled tokens that were dropped: behind a stop, or of ended requests

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        self._running[request.request_id] = request

    def discard(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def plan_rows(self, step_id: int) -> list[DecodeRow]:
        """One row for each sequence that may still need a token. Mutates: growth, planned counts."""
        rows = []
        for request in self._running.values():
            for sequence in request.sequences:
                if sequence.finish_reason is None and sequence.num_planned < request.max_tokens:
                    rows.append(self._plan_row(request, sequence))
                    request.last_step_id = step_id
        return rows

    def commit(self, token: SampledToken) -> TokenEvent | None:
        """Take one sampled token into account; None when it is surplus. Mutates."""
        request = self._running.get(token.request_id)
        sequence = _live_sequence(request, token.choice) if request else None
        if request is None or sequence is None:
            self.num_surplus_tokens += 1
            return None
        if sequence.num_known > 0:  # the first token comes from a prompt, not from a row
            self.num_forwarded_tokens += 1
        sequence.num_known += 1
        sequence.finish_reason = request.finish_reason_of(token.token_id, sequence.num_known)
        return TokenEvent(
            token.request_id, token.choice, sequence.num_known - 1, token.token_id, sequence.finish_reason
        )

    def _plan_row(self, request: Request, sequence: Sequence) -> DecodeRow:
        position = request.prompt_len + sequence.num_planned - 1
        self._make_writable(sequence, position // self._block_size)
        sequence.num_planned += 1
        return DecodeRow(request.request_id, sequence.choice, sequence.slot, position)

    def _make_writable(self, sequence: Sequence, index: int) -> None:
        """Give the sequence a block of its own at `index` of its table: a new one, or a copy of a shared one."""
        blocks = sequence.block_ids
        if index == len(blocks):
            (block_id,) = self._allocator.allocate(1, after=blocks[-1])
            blocks.append(block_id)
        elif self._allocator.is_shared(blocks[index]):
            source = blocks[index]
            (block_id,) = self._allocator.allocate(1, after=blocks[index - 1] if index else None)
            self._builder.copy_block(source, block_id)
            self._allocator.release((source,))
            blocks[index] = block_id
        else:
            return
        self._builder.write_table(sequence.slot, index, (block_id,))


def _live_sequence(request: Request, choice: int) -> Sequence | None:
    for sequence in request.sequences:
        if sequence.choice == choice and sequence.finish_reason is None:
            return sequence
    return None
