"""Packs prompts into steps: in the queue's order, long prompts in chunks, never over the token budget.

A prompt is cut into no more pieces than its length asks for. What a step has left is not filled with the beginning of a
prompt that would then need a piece more: the prompt in front would have its first token later, and the cut one is none
the sooner. (On an H200 two prompts of 2,048 tokens in steps of 2,304 took 57 and 58 ms so, and 47 each whole.)

Where a step has room for so many tokens, a prompt that goes on behind it is cut at a multiple of chunk_multiple, and
what is left of the step stays empty: on a card its next chunk is computed faster from there on.

Where no row waits for a step, a long prompt may be one step: its attention is a library's then, not that over the pool.
But prompts that share a step all have their first tokens at its end, so no more share one than keep a device busy.
"""

from __future__ import annotations

from contextlib import closing

from scheduler.plan import SampleTarget, Slice
from scheduler.request import Request, RequestState
from scheduler.waiting_queue import WaitingQueue


class PrefillBatcher:
    """Admitted prompts whose blocks are allocated. Memory for all of them does not mean time for all of them, so
    their order is that of `waiting_queue` here too; but one that was begun is finished first.
    """

    def __init__(self, most_shared_tokens: int | None = None, chunk_multiple: int = 1) -> None:
        """most_shared_tokens: of a step that has several prompts; None: as many as of any other. chunk_multiple: as in
        PoolLimits."""
        self._most_shared_tokens = most_shared_tokens
        self._chunk_multiple = chunk_multiple
        self._waiting = WaitingQueue()
        self._begun: Request | None = None
        self._num_pending_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting) + (self._begun is not None)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that are in no plan yet."""
        return self._num_pending_tokens

    def add(self, request: Request) -> None:
        self._waiting.add(request, request.prompt_len - request.num_prefilled)
        self._num_pending_tokens += request.prompt_len - request.num_prefilled

    def discard(self, request: Request) -> None:
        """It is over. Ignored unless it is here."""
        if request is self._begun:
            self._begun = None
        elif not self._waiting.discard(request.request_id):
            return
        self._num_pending_tokens -= request.prompt_len - request.num_prefilled

    def plan_chunks(self, token_budget: int, step_id: int, now_s: float) -> tuple[list[Slice], list[Request]]:
        """Chunks of at most `token_budget` tokens in all, and the requests whose prompt they complete.

        Mutates: progress, states, and completed requests leave the batcher. Earlier prompts in the order are
        served first; a later one only takes what they leave, and waits where that would cut it once more.
        """
        chunks: list[Slice] = []
        completed: list[Request] = []
        room = token_budget
        while room > 0 and (request := self._begun or self._begin(room, token_budget)) is not None:
            chunk = self._next_chunk(request, room)
            room -= chunk.num_tokens
            chunks.append(chunk)
            if request.state is RequestState.ADMITTED:
                request.enter(RequestState.PREFILLING, now_s)
            request.num_prefilled += chunk.num_tokens
            self._num_pending_tokens -= chunk.num_tokens
            request.last_step_id = step_id
            if request.num_prefilled < request.prompt_len:
                break  # it was cut: what is left of the step is nobody's
            completed.append(request)
            self._begun = None
        return chunks, completed

    def _begin(self, room: int, token_budget: int) -> Request | None:
        with closing(self._waiting.in_order()) as waiting:
            first = next(waiting, None)
        if first is None:
            return None
        of_room, of_budget = (
            num_pieces(first.num_prefilled, first.prompt_len, tokens, token_budget, self._chunk_multiple)
            for tokens in (room, token_budget)
        )
        if of_room > of_budget:
            return None
        if self._most_shared_tokens is not None and room < token_budget:
            num_tokens = token_budget - room + first.prompt_len - first.num_prefilled
            if num_tokens > self._most_shared_tokens:
                return None
        self._waiting.take(first.request_id)
        self._begun = first
        return first

    def _next_chunk(self, request: Request, token_budget: int) -> Slice:
        start = request.num_prefilled
        end = chunk_end(start, request.prompt_len, token_budget, self._chunk_multiple)
        targets: tuple[SampleTarget, ...] = ()
        if end == request.prompt_len:
            # What is handed over has one sequence for all choices: they only part at decode.
            slot_of = {sequence.choice: sequence.slot for sequence in request.sequences}
            first_slot = request.sequences[0].slot
            targets = tuple(SampleTarget(slot_of.get(choice, first_slot), choice) for choice in request.prompt_choices)
        prompt_ids = request.spec.prompt_ids
        is_scored = request.spec.sampling.num_prompt_logprobs is not None
        # The chunk's last token scores the first one of the next.
        scored_ids = prompt_ids[start + 1 : end + 1] if is_scored else None
        slot = request.sequences[0].slot
        return Slice.of_prompt(request.request_id, slot, start, prompt_ids[start:end], targets, scored_ids)


def chunk_end(start: int, prompt_len: int, room: int, multiple: int) -> int:
    """Where the chunk that begins at `start` ends: behind at most `room` tokens, at a multiple if the prompt goes on.

    Only where there is room for chunks of `multiple` tokens, and not where a small piece would be left of it: each
    chunk is a pass of its own.
    """
    end = min(prompt_len, start + room)
    cut = end // multiple * multiple
    return cut if end < prompt_len and room >= multiple and cut - start >= max(1, multiple // 4) else end


def num_pieces(start: int, prompt_len: int, room: int, token_budget: int, multiple: int) -> int:
    """Into how many chunks a prompt is cut from `start` on, if the first is of up to `room` tokens, and the others of
    the budget. multiple: as `chunk_end` has it."""
    count = 1
    start = chunk_end(start, prompt_len, room, multiple)
    while start < prompt_len and token_budget >= multiple > 1:
        start = chunk_end(start, prompt_len, token_budget, multiple)
        count += 1
    return count - (start - prompt_len) // token_budget
