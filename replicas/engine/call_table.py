"""A router's call, from submission until its reply: the call, what the scheduler keeps of it, and the future."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from replicas.messages import GenerationRequest
from scheduler.beam_search import BeamSearch
from scheduler.request import Request, RequestState
from scheduler.sampling_params import SamplingParams

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")


@dataclass(slots=True)
class OpenCall(Generic[CallT, ReplyT]):
    """Engine thread only, but for the future."""

    call: CallT
    request: Request
    future: Future[ReplyT] = field(default_factory=Future)
    first_token_s: float | None = None  # when the first token of a prompt that was computed here was known

    def reply(self, reply: ReplyT) -> None:
        """Answer. The other side may have gone (a cancelled future); that is not an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(reply)

    def time_between(self, start: RequestState, end: RequestState) -> float:
        """Seconds from entering one state to entering another; 0.0 when either was never entered."""
        entered_s = self.request.entered_s
        return entered_s[end] - entered_s[start] if start in entered_s and end in entered_s else 0.0

    def prefill_s(self) -> float:
        """From admission to the first token, of a prompt that a decode engine computed itself; else 0.0."""
        if self.first_token_s is None:
            return 0.0
        return self.first_token_s - self.request.entered_s[RequestState.ADMITTED]

    def decode_s(self) -> float:
        """From there, or from KV in place, to the last token; 0.0 without one.

        A beam search has no first token before its end: where decode computes its prompt, that counts in here.
        """
        if self.first_token_s is not None:
            return max(0.0, self.request.entered_s.get(RequestState.FINISHED, 0.0) - self.first_token_s)
        is_prompt_own = RequestState.PREFILLING in self.request.entered_s
        began = RequestState.ADMITTED if is_prompt_own else RequestState.RUNNING
        return self.time_between(began, RequestState.FINISHED)


def scheduler_request(
    request: GenerationRequest, now_s: float, *, local_prefill: bool, hands_over: bool = False
) -> Request:
    """The scheduler's view of a request that arrived at `now_s`: its relative timeout becomes a deadline.

    A beam search samples nothing: of each row it wants the most likely tokens, by the model's own logits.
    """
    sampling, search = request.sampling, None
    if request.beam is not None:
        search = BeamSearch(request.beam, request.stop_token_ids, request.max_tokens)
        num_candidates = request.beam.num_candidates(len(request.stop_token_ids))
        scores = request.sampling.num_prompt_logprobs
        sampling = SamplingParams(temperature=0.0, num_logprobs=num_candidates, num_prompt_logprobs=scores)
    return Request(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        choices=request.choices,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        sampling=sampling,
        deadline_s=now_s + request.timeout_s,
        local_prefill=local_prefill,
        hands_over=hands_over,
        priority=request.priority,
        client=request.client,
        num_output_in_prompt=request.num_output_in_prompt,
        search=search,
        num_returned=request.num_returned,
    )
