"""How an attempt at a generation fails: what the client is told of it, and what the next attempt makes of it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.api_error import ApiError
from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.model_binding import OtherModel
from cluster.routing.pool_client import Loss, ReplicaLost
from replicas.messages import CallStatus

logger = logging.getLogger(__name__)

# Evictions in a row that brought no token. In simulated storms 112 of 2,497 evictions brought none, so that by chance
# some two in a row happen; with the pauses between them, which double, these many last for 13 s.
_MAX_BARREN = 8
# Deaths of replicas that a request may live through if it gets on in between: who has such a life is rather their
# cause, but by what nobody knows.
_MAX_OUTLIVED = 10


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
    def is_of_handover(self) -> bool:
        """Whether it came to nothing after admission and before decode had the prompt's KV, and not for a replica that
        was lost."""
        is_between = self.stage in (Stage.PREFILL, Stage.TRANSFER) and self.status is not CallStatus.EVICTED
        return is_between and not isinstance(self.__cause__, ReplicaLost | OtherModel)

    @property
    def has_lost_kv(self) -> bool:
        """Whether the KV has not come, has not come in time, or came changed."""
        return self.is_of_handover and self.may_retry and self.status in (CallStatus.KV_LOST, CallStatus.TIMEOUT)

    def is_death_of_who_computed(self, stage: Stage, route: Route) -> bool:
        """Whether the replica, or its engine, that had the request in its steps went. stage: where the attempt was. One
        that only kept memory for it does not count, nor one that leaves, nor one that its call has not reached."""
        cause = self.__cause__
        if isinstance(cause, ReplicaLost) and cause.may_have_reached and not cause.had_left:
            is_of_prefill = cause.replica_id == route.prefill_id
        elif self.status is CallStatus.ENGINE_FAILED:
            is_of_prefill = self.stage is Stage.PREFILL
        else:
            return False
        if route.prefill_id is not None and stage is Stage.PREFILL:
            return is_of_prefill
        return stage is not Stage.QUEUE and not is_of_prefill

    @property
    def found_dead(self) -> str | None:
        """The replica whose death ended it."""
        cause = self.__cause__
        return cause.replica_id if isinstance(cause, ReplicaLost) and cause.loss is Loss.DEAD else None

    def log(self, generation_id: str, route: Route, attempt: int) -> None:
        """attempt: how many of its generation failed before it."""
        how = {"stage": self.stage, "status": self.status, "detail": self.detail, "attempt": attempt}
        where = {"generation": generation_id, "decode": route.decode_id, "prefill": route.prefill_id}
        # Nobody had room in time: the pool is full, nothing is broken, and the client's 429 has a line of its own.
        is_normal = self.stage is Stage.QUEUE and self.status is CallStatus.TIMEOUT
        level = logging.INFO if is_normal else logging.WARNING
        logger.log(level, "attempt failed", extra={"event": "attempt_failed", **how, **where})

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
            text = (
                "allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar or schema together leave no "
                "token to choose; relax one of them"
            )
            return ApiError(400, text, code="nothing_allowed")
        if self.status is CallStatus.GRAMMAR_LIMIT:
            text = "following the grammar or schema took more work than one request may cause; make it simpler"
            return ApiError(400, text, code="grammar_limit")
        if self.status is CallStatus.EVICTED:
            text = "the request gave way to others for want of KV memory, again and again; try again later"
            return ApiError(429, text, code="kv_memory_short", retry_after_s=1.0)
        # What an engine says of its own fault is for the log: it could be anything.
        text = f"the request failed at {self.stage}; the server's log has more under {generation_id}"
        return ApiError(500, text, code="failed")

    def __str__(self) -> str:
        return f"{self.stage}: {self.status}: {self.detail}"


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """What became of a leg's attempts so far, those before it was split included.

    excluded: replicas to avoid. num_barren: evictions since the last one that brought a token. num_lost: failures on
    the way over a prefill replica. num_deaths: replicas that died while they computed it, since it last got past the
    place where one did: that is a row of its own, or more. What they died of gets no further anywhere. silent: of
    these, those that may live: out of reach, or they have stopped answering. num_outlived: deaths after which it did.
    """

    num_failed: int = 0
    excluded: frozenset[str] = frozenset()
    num_barren: int = 0
    num_lost: int = 0
    num_deaths: int = 0
    num_outlived: int = 0
    silent: tuple[str, ...] = ()

    def num_dead(self, answering: Collection[str]) -> int:
        """Deaths but for those of replicas that answer again: a network that fails for a moment, or is slow, kills
        nobody."""
        return self.num_deaths - sum([replica_id in answering for replica_id in self.silent])

    def after(
        self,
        failure: AttemptFailed,
        route: Route,
        *,
        is_search: bool = False,
        has_advanced: bool = True,
        has_run: bool = False,
        has_killed: bool = False,
    ) -> AttemptHistory:
        """has_advanced: the attempt brought a token. has_run: one of a row. has_killed: who computed it died."""
        after = self._after(failure, route, is_search, has_advanced, has_killed)
        if has_killed and has_run:  # it got on, and is no more at fault than those beside it: the first one in a row
            after = replace(after, num_failed=1, num_outlived=self.num_outlived + 1)
        num_deaths, silent = (0, ()) if has_run else (self.num_deaths, self.silent)
        cause = failure.__cause__
        if has_killed and isinstance(cause, ReplicaLost) and cause.loss is not Loss.DEAD:
            silent = (*silent, cause.replica_id)
        return replace(after, num_deaths=num_deaths + has_killed, silent=silent)

    def _after(
        self, failure: AttemptFailed, route: Route, is_search: bool, has_advanced: bool, has_killed: bool
    ) -> AttemptHistory:
        if failure.status is CallStatus.EVICTED:
            # Memory ran short: nobody's fault. It comes to an end where replays add tokens; not each does. A beam
            # search begins anew.
            if is_search:
                return replace(self, num_failed=self.num_failed + 1)
            return replace(self, num_barren=0 if has_advanced else self.num_barren + 1)
        cause = failure.__cause__
        if route.kind is RouteKind.MOVED and failure.stage is Stage.TRANSFER:
            # It was moved for others' sake, and is replayed as if its replica had died. It is not moved without end:
            # each replica leaves once.
            return self
        if isinstance(cause, OtherModel):
            # Nor is this a fault: another part of the request was quicker. From now on this one goes where that went.
            return self
        if isinstance(cause, ReplicaLost) and not has_killed and cause.replica_id not in self.excluded:
            # It was about to leave, or was lost while this one waited there. Each is once, so this comes to an end.
            return replace(self, excluded=self.excluded | {cause.replica_id})
        # If it is not known which of the two was at fault, both are avoided.
        at_fault = {cause.replica_id} if isinstance(cause, ReplicaLost) else {route.decode_id, route.prefill_id}
        excluded = self.excluded.union(id_ for id_ in at_fault if id_ is not None)
        num_lost = self.num_lost + (route.prefill_id is not None and failure.is_of_handover)
        return AttemptHistory(self.num_failed + 1, excluded, self.num_barren, num_lost)

    def is_over(self, max_retries: int) -> bool:
        """Whether it has failed as often as it may, or gives way again and again without getting on, or replicas die
        around it."""
        is_outlived = self.num_outlived > _MAX_OUTLIVED
        return self.num_failed > max_retries or self.num_barren > _MAX_BARREN or is_outlived

    def pause_s(self, first_s: float) -> float:
        """Wait before the next try: first_s, doubled with each failure and each eviction without a token; half of it
        after evictions that brought some."""
        return float(first_s * 2 ** (self.num_failed + self.num_barren - 1))
