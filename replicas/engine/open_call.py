"""A router's call, from submission until its reply: the call, what the scheduler keeps of it, and the future."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from replicas.grammars.choice_texts import ChoiceTexts
from replicas.messages import (
    CallStatus,
    EngineLoad,
    GenerateCall,
    GenerateReply,
    Handoff,
    PrefillCall,
    PrefillReply,
    Token,
)
from scheduler.outcome import NeverFits
from scheduler.request import Request, RequestState


@dataclass(slots=True)
class OpenCall:
    """Engine thread only, but for the future. A GenerateCall is decoded here, a PrefillCall's KV is handed over."""

    call: GenerateCall | PrefillCall
    request: Request
    future: Future[Any] = field(default_factory=Future)  # of the call's kind of reply
    # Of one with a grammar: its texts, as soon as that is compiled.
    coming: Future[ChoiceTexts] | None = None
    texts: ChoiceTexts | None = None
    # Of a GenerateCall.
    router_id: str = ""  # whose token channel its tokens take
    first_token_s: float | None = None  # when the first token of a prompt that was computed here was known
    handoff: Handoff | None = None  # once it has arrived, or its last part has
    handed_over_s: float | None = None  # when that was
    is_kv_read: bool = False  # and so has its KV
    num_sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by choice, in frames
    token_ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by choice, all known
    # Of a PrefillCall.
    scores: list[bytes] = field(default_factory=list)  # of the prompt's chunks so far, if asked for; as in the reply
    is_reader_checked: bool = False  # nobody would read from it in vain
    first_tokens: tuple[Token, ...] | None = None  # once they are known
    num_offered: int = 0  # of its prompt's blocks, in parts

    @property
    def is_read(self) -> bool:
        """Whether its KV comes from a source."""
        return isinstance(self.call, GenerateCall) and self.call.source is not None

    def refusal(self, error: NeverFits) -> str:
        """What its router is told of a request that is too large."""
        if isinstance(self.call, PrefillCall):
            return f"a prompt of {self.request.prompt_len} tokens {error}"
        spec = self.call.spec
        needs = f"{spec.prompt_len} prompt tokens and max_tokens {spec.max_tokens}"
        return f"{needs}, {len(spec.choices)} choices: {error}"

    def reply(self, reply: GenerateReply | PrefillReply) -> None:
        """Answer. The other side may have gone (a cancelled future); that is not an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(reply)

    def generate_reply(self, status: CallStatus, detail: str) -> GenerateReply:
        return GenerateReply(
            status=status,
            detail=detail,
            num_tokens_sent=tuple(sorted(self.num_sent.items())),
            queue_s=self.time_between(RequestState.QUEUED, RequestState.ADMITTED),
            transfer_s=self.transfer_s(),
            decode_s=self.decode_s(),
            prefill_s=self.prefill_s(),
            num_cached=self.request.num_cached,
        )

    def prefill_reply(self, status: CallStatus, detail: str, load: EngineLoad) -> PrefillReply:
        queue_s = self.time_between(RequestState.QUEUED, RequestState.ADMITTED)
        done_state = RequestState.LEASED if RequestState.LEASED in self.request.entered_s else RequestState.FINISHED
        prefill_s = self.time_between(RequestState.ADMITTED, done_state)
        is_ok = status is CallStatus.OK
        first_tokens = self.first_tokens or () if is_ok else ()
        scores = tuple(self.scores) if is_ok else ()
        found = self.request.num_cached
        return PrefillReply(status, detail, first_tokens, queue_s, prefill_s, load, scores, found)

    def time_between(self, start: RequestState, end: RequestState) -> float:
        """Seconds from entering one state to entering another; 0.0 when either was never entered."""
        entered_s = self.request.entered_s
        return entered_s[end] - entered_s[start] if start in entered_s and end in entered_s else 0.0

    def prefill_s(self) -> float:
        """From admission to the first token, of a prompt that was computed where it is decoded; else 0.0."""
        if self.first_token_s is None:
            return 0.0
        return self.first_token_s - self.request.entered_s[RequestState.ADMITTED]

    def transfer_s(self) -> float:
        """From the handoff, its last part if it came in some, to KV in place; 0.0 when it came to neither."""
        running_s = self.request.entered_s.get(RequestState.RUNNING)
        return 0.0 if running_s is None or self.handed_over_s is None else running_s - self.handed_over_s

    def decode_s(self) -> float:
        """From there, or from KV in place, to the last token; 0.0 without one.

        A beam search has no first token before its end: where decode computes its prompt, that counts in here.
        """
        if self.first_token_s is not None:
            return max(0.0, self.request.entered_s.get(RequestState.FINISHED, 0.0) - self.first_token_s)
        is_prompt_own = RequestState.PREFILLING in self.request.entered_s
        began = RequestState.ADMITTED if is_prompt_own else RequestState.RUNNING
        return self.time_between(began, RequestState.FINISHED)


def open_call(call: GenerateCall | PrefillCall, now_s: float) -> OpenCall:
    """Of a call that arrived at `now_s`: its relative timeout becomes a deadline."""
    deadline_s = now_s + call.timeout_s
    if isinstance(call, PrefillCall):
        request = Request(call.request_id, call.spec, deadline_s, hands_over=True, has_begun=call.has_begun)
        return OpenCall(call, request)
    request = Request(
        call.request_id,
        call.spec,
        deadline_s,
        local_prefill=call.source is None,
        has_begun=call.has_begun,
        is_suspect=call.is_suspect,
        num_generated=min(call.num_generated, call.spec.max_tokens - 1),
    )
    return OpenCall(call, request, router_id=call.channel.router_id)
