"""Packs prompts into steps: first come first served, long prompts in chunks, never over the token budget."""

from __future__ import annotations

from collections import OrderedDict

from scheduler.plan import PrefillChunk, SampleTarget
from scheduler.request import Request, RequestState


class PrefillBatcher:
    """Admitted prompts whose blocks are allocated, in order of arrival."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, Request] = OrderedDict()  # a dict looks for its first key in linear time
        self._num_pending_tokens = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that are in no plan yet."""
        return self._num_pending_tokens

    def add(self, request: Request) -> None:
        self._prompts[request.request_id] = request
        self._num_pending_tokens += request.prompt_len - request.num_prefilled

    def discard(self, request_id: str) -> None:
        request = self._prompts.pop(request_id, None)
        if request is not None:
            self._num_pending_tokens -= request.prompt_len - request.num_prefilled

    def plan_chunks(self, token_budget: int, step_id: int, now_s: float) -> tuple[list[PrefillChunk], list[Request]]:
        """Chunks of at most `token_budget` tokens in all, and the requests whose prompt they complete.

        Mutates: progress, states, and completed requests leave the batcher. Earlier prompts are served
        first; a later one only takes what they leave.
        """
        chunks: list[PrefillChunk] = []
        completed: list[Request] = []
        while self._prompts and token_budget > 0:
            request = next(iter(self._prompts.values()))  # one that is not completed uses the budget up
            chunk = self._next_chunk(request, token_budget)
            token_budget -= len(chunk.token_ids)
            chunks.append(chunk)
            if request.state is RequestState.ADMITTED:
                request.enter(RequestState.PREFILLING, now_s)
            request.num_prefilled += len(chunk.token_ids)
            self._num_pending_tokens -= len(chunk.token_ids)
            request.last_step_id = step_id
            if chunk.targets:
                completed.append(request)
                self.discard(request.request_id)
        return chunks, completed

    @staticmethod
    def _next_chunk(request: Request, token_budget: int) -> PrefillChunk:
        start = request.num_prefilled
        end = min(request.prompt_len, start + token_budget)
        targets: tuple[SampleTarget, ...] = ()
        if end == request.prompt_len:
            # A prefill engine has one sequence for all choices: they only part at decode.
            slot_of = {sequence.choice: sequence.slot for sequence in request.sequences}
            first_slot = request.sequences[0].slot
            targets = tuple(SampleTarget(slot_of.get(choice, first_slot), choice) for choice in request.prompt_choices)
        is_scored = request.sampling.num_prompt_logprobs is not None
        # The chunk's last token scores the first one of the next.
        scored_ids = request.prompt_ids[start + 1 : end + 1] if is_scored else None
        return PrefillChunk(
            request.request_id, request.sequences[0].slot, start, request.prompt_ids[start:end], targets, scored_ids
        )
