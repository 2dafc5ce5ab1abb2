"""How an attempt at a generation fails, and what the client is told of it."""

from __future__ import annotations

from enum import StrEnum

from cluster.api_error import ApiError
from replicas.messages import CallStatus


class Stage(StrEnum):
    """Where an attempt failed."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


class AttemptFailed(Exception):
    """This attempt is over without its last token. may_retry: another try, perhaps elsewhere, can succeed."""

    def __init__(self, stage: Stage, status: CallStatus, detail: str, may_retry: bool) -> None:
        super().__init__(stage, status, detail, may_retry)
        self.stage, self.status, self.detail, self.may_retry = stage, status, detail, may_retry

    @property
    def is_before_handover(self) -> bool:
        """Whether it came to nothing after admission and before decode had the prompt's KV."""
        return self.stage in (Stage.PREFILL, Stage.TRANSFER) and self.status is not CallStatus.EVICTED

    @property
    def has_lost_kv(self) -> bool:
        """Whether a handoff is at fault: the KV has not come, has not come in time, or came changed."""
        return self.is_before_handover and self.may_retry and self.status in (CallStatus.KV_LOST, CallStatus.TIMEOUT)

    def api_error(self, has_emitted: bool, generation_id: str) -> ApiError:
        """What the client is told if this is the end. has_emitted: it has got tokens. generation_id: as in the log."""
        if self.status is CallStatus.TIMEOUT and self.stage is Stage.QUEUE and not has_emitted:
            text = f"no decode replica had room in time ({self.detail}); try again later"
            return ApiError(429, text, code="queue_timeout", retry_after_s=1.0)
        if self.status is CallStatus.TIMEOUT:
            return ApiError(504, f"the request timed out at {self.stage}: {self.detail}", code="timeout")
        if self.status is CallStatus.REJECTED:
            return ApiError(503, f"refused at {self.stage}: {self.detail}", code="unavailable", retry_after_s=1.0)
        if self.status is CallStatus.NOTHING_ALLOWED:
            text = "allowed_token_ids, bad_words, logit_bias and min_tokens leave no token to choose; relax one of them"
            return ApiError(400, text, code="nothing_allowed")
        if self.status is CallStatus.EVICTED:
            text = "the request gave way to others for want of KV memory, again and again; try again later"
            return ApiError(503, text, code="kv_memory_short", retry_after_s=1.0)
        # What an engine says of its own fault is for the log: it could be anything.
        text = f"the request failed at {self.stage}; the server's log has more under {generation_id}"
        return ApiError(500, text, code="failed")

    def __str__(self) -> str:
        return f"{self.stage}: {self.status}: {self.detail}"
