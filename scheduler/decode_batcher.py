"""Running sequences: one row each per step, growth by blocks, copy-on-write, and what a sampled token means.

Tokens are planned ahead of being known: `num_planned` runs in front of `num_known` by the
engine's lag. A sequence that ends by a stop token leaves rows in flight behind it; their tokens are
surplus, counted and dropped. One that ends by length leaves none, since that end is planned.

A row with drafts is planned as if all of them were to count, and settled by how many do. So what is planned is the
furthest that a sequence may be, and it has blocks up to there, as the next step may be launched before that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from scheduler.beam_batcher import BeamBatcher
from scheduler.block_allocator import BlockAllocator
from scheduler.draft_planner import DraftPlanner, DraftRoom
from scheduler.generated_token import Token
from scheduler.memory_budget import num_blocks_for
from scheduler.plan import Accepted, SampledToken, Slice
from scheduler.plan_builder import PlanBuilder
from scheduler.preemption import growth_blocks, importance
from scheduler.request import Request, Sequence


class DecodeBatcher:
    """The running batch of one engine."""

    def __init__(
        self,
        allocator: BlockAllocator,
        builder: PlanBuilder,
        block_size: int,
        filled: Callable[[Request, Sequence], None] | None = None,
        drafts: DraftPlanner | None = None,
    ) -> None:
        """filled: is told of a sequence with a chain whose block the committed tokens have filled. drafts: None: rows
        have none."""
        self._allocator = allocator
        self._builder = builder
        self._block_size = block_size
        self._filled = filled
        self._drafts = drafts
        self.has_drafts = False  # whether rows of the last plan have any
        self._moved: dict[str, Request] = {}  # they may be elsewhere than was projected
        self.beams = BeamBatcher(allocator, builder)
        self._running: dict[str, Request] = {}
        self._paused: dict[str, Request] = {}  # without rows, but tokens of rows in flight still count
        self.num_forwarded_tokens = 0  # rows whose token counted
        self.num_surplus_tokens = 0  # sampled tokens that were dropped: behind a stop, or of ended requests

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        self._running[request.request_id] = request

    def discard(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._paused.pop(request_id, None)

    def pause(self, request: Request) -> None:
        """It was preempted: no more rows. Mutates."""
        self._paused[request.request_id] = self._running.pop(request.request_id)

    def resume(self, request: Request) -> None:
        """It is back. Mutates."""
        self._running[request.request_id] = self._paused.pop(request.request_id)

    def running_on(self, block_ids: Collection[int]) -> list[str]:
        """Requests whose rows are computed from any of these blocks. O(blocks)."""
        tables = [
            (request.request_id, sequence.block_ids) for request in self.requests for sequence in request.sequences
        ]
        return [request_id for request_id, table in tables if not set(block_ids).isdisjoint(table)]

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that take part in steps."""
        return tuple(self._running.values())

    def plan_rows(
        self, step_id: int, num_available: int, room: Callable[[int, int], DraftRoom | None] | None = None
    ) -> tuple[list[Slice], list[Request]]:
        """One row for each sequence that may still need a token, and who must wait a step for a free block.

        room: for drafts, beside so many rows, of so many free blocks that these leave. Mutates: growth, planned counts.
        All choices of a request wait together, the least important requests first.
        """
        requests: Iterable[Request] = self._running.values()
        may_stall = num_available < sum([len(request.sequences) for request in requests])
        if may_stall:
            requests = sorted(requests, key=importance)
        going: list[tuple[Request, Sequence]] = []
        stalled: list[Request] = []
        for request in requests:
            most = request.spec.max_tokens
            live = [s for s in request.sequences if s.finish_reason is None and s.num_planned < most]
            if not live or request.awaits_tokens:
                continue
            if may_stall:
                needed = growth_blocks(request, 1, self._block_size)
                if needed > num_available:
                    stalled.append(request)
                    continue
                num_available -= needed
            going += [(request, sequence) for sequence in live]
            request.last_step_id = step_id
        left = room(len(going), num_available - len(going)) if room is not None and going and not may_stall else None
        self.has_drafts = False
        if left is None or self._drafts is None:
            return [self._plan_row(request, sequence) for request, sequence in going], stalled
        counts = self._drafts.plan(going, left)
        self.has_drafts = any(counts)
        return [self._plan_row(*one, count) for one, count in zip(going, counts, strict=True)], stalled

    def take_moved(self) -> list[Request]:
        """Requests that drafts have taken elsewhere than was projected. Mutates: each is named once."""
        if not self._moved:
            return []
        moved, self._moved = list(self._moved.values()), {}
        return moved

    def counts(self, token: SampledToken) -> bool:
        """Whether it is the next one of its choice, and not surplus."""
        request = self._running.get(token.request_id) or self._paused.get(token.request_id)
        return request is not None and _live_sequence(request, token.choice) is not None

    def commit(self, token: SampledToken) -> Token | None:
        """Take one sampled token into account; None when it is surplus, or a beam's: see `beams`. Mutates."""
        request = self._running.get(token.request_id) or self._paused.get(token.request_id)
        sequence = _live_sequence(request, token.choice) if request else None
        if request is None or sequence is None:
            self.num_surplus_tokens += 1
            return None
        if sequence.num_known > 0:  # the first token comes from a prompt, not from a row
            self.num_forwarded_tokens += 1
        if request.search is not None:
            assert token.logprobs is not None, "a search goes on by its tokens' log-probabilities"
            self.beams.take(request, sequence, token.logprobs.top)
            return None
        index = sequence.num_known
        sequence.num_known += 1
        if (chain := sequence.chain) is not None:
            chain.ids.append(token.token_id)
            if len(chain.ids) > self._block_size:  # the last one's KV is not written
                assert self._filled is not None
                self._filled(request, sequence)
        sequence.finish_reason = reason = request.finish_reason_of(token.token_id, sequence.num_known)
        return Token(token.request_id, token.choice, index, token.token_id, reason, token.logprobs)

    def settle(self, accepted: Accepted) -> None:
        """Of a slice with guesses, whose tokens that count are committed: the others were never planned. Mutates.

        Blocks are free again that are beyond what this sequence may have written, or may yet write by later slices.
        """
        request = self._running.get(accepted.request_id) or self._paused.get(accepted.request_id)
        sequence = _live_sequence(request, accepted.choice) if request else None
        if request is None or sequence is None:
            return
        sequence.num_planned -= accepted.num_sampled - accepted.num_accepted
        sequence.num_unsure -= accepted.num_sampled - 1
        num_needed = num_blocks_for(request.prompt_len + sequence.num_planned - 1, self._block_size)
        surplus = sequence.block_ids[num_needed:]
        del sequence.block_ids[num_needed:]
        self._allocator.release(surplus)
        self._moved[request.request_id] = request
        if self._drafts is not None:
            self._drafts.settled(request, accepted)

    def _plan_row(self, request: Request, sequence: Sequence, num_drafts: int = 0) -> Slice:
        position = len(request.spec.prompt_ids) + sequence.num_planned - 1
        self._make_writable(sequence, position // self._block_size)
        if not num_drafts:
            sequence.num_planned += 1
            return Slice(request.request_id, sequence.choice, sequence.slot, position)
        for index in range(position // self._block_size + 1, (position + num_drafts) // self._block_size + 1):
            self._make_writable(sequence, index)
        count = 1 + num_drafts
        sequence.num_planned += count
        sequence.num_unsure += num_drafts
        self._moved[request.request_id] = request
        return Slice(request.request_id, sequence.choice, sequence.slot, position, count, count, num_drafts=num_drafts)

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
