"""Everybody who waits for an answer of an engine, and how each gets one: at its end, early, or in spite of a fault."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from replicas.channels.wire import encode_scores
from replicas.engine.constrained_rows import ConstrainedRows, Grammars
from replicas.engine.handoffs import Handoffs
from replicas.engine.open_call import OpenCall
from replicas.engine.token_frames import TokenFrames
from replicas.grammars.compiled_grammar import GrammarRefused
from replicas.messages import CallStatus, EngineLoad, GenerateCall, PromptLogprobs, Token
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.engine_core import EngineCore, Turn
from scheduler.lane import Lane
from scheduler.outcome import DuplicateRequest, NeverFits, PromptDone
from scheduler.plan import StepOutput, StepPlan
from scheduler.request import RequestState

logger = logging.getLogger(__name__)


class OpenCalls:
    """Engine thread only. by_id: by request id, until their reply."""

    def __init__(
        self,
        engine: str,
        core: EngineCore[Any],
        metrics: EngineMetrics,
        frames: TokenFrames | None,
        load: Callable[[], EngineLoad],
        grammars: Grammars | None = None,
    ) -> None:
        """engine: its name in logs. frames: what tokens leave by. load: the engine's, as far as it is known. grammars:
        None where calls with one are refused."""
        self.by_id: dict[str, OpenCall] = {}
        self.constrained = ConstrainedRows(grammars, metrics, self.by_id)
        self._compiling: dict[str, float] = {}  # deadlines of those that wait for their grammar, and for nothing else
        self.handoffs = Handoffs(core.scheduler, self, self._joined)
        self._finished: list[tuple[OpenCall, CallStatus]] = []  # to be answered after this iteration's frames
        self._engine, self._core, self._scheduler = engine, core, core.scheduler
        self._metrics, self._frames, self._load = metrics, frames, load

    # -- arrival, and what comes of it -------------------------------------------------------------

    def submit(self, opened: OpenCall) -> None:
        """A call has come. Answers it if it cannot be taken."""
        call, request = opened.call, opened.request
        if request.spec.grammar is not None and not self._may_begin(opened):
            return
        try:
            if self._frames is not None and isinstance(call, GenerateCall):
                self._frames.sender.open(call.channel)
            self._scheduler.submit(request, time.monotonic())
        except NeverFits as error:
            self.reply(opened, CallStatus.REJECTED, opened.refusal(error))
        except ValueError as error:  # an unusable channel address, a known id, or something this engine has no half for
            self.reply(opened, CallStatus.ERROR, str(error))
        except Exception as error:
            self._fail_new(opened, error)
        else:
            self.by_id[request.request_id] = opened

    def _may_begin(self, opened: OpenCall) -> bool:
        """Whether one with a grammar may be queued. One whose KV is read is, while its grammar is compiled; another one
        waits here. Answers it if it cannot be taken."""
        request_id = opened.request.request_id
        if opened.coming is None:
            self.reply(opened, CallStatus.ERROR, "this model has no grammars: see the replica's log")
            return False
        if opened.coming.done():
            return self._take_grammar(opened)
        if opened.is_read:
            return True
        if request_id in self.by_id:
            self.reply(opened, CallStatus.ERROR, str(DuplicateRequest(request_id)))
            return False
        self.by_id[request_id] = opened
        self._compiling[request_id] = opened.request.deadline_s
        return False

    def grammar_compiled(self, request_id: str) -> None:
        """Its grammar is there, or refused. Mutates."""
        opened = self.by_id.get(request_id)
        if opened is None or opened.texts is not None:
            return
        if self._compiling.pop(request_id, None) is not None:
            del self.by_id[request_id]
            self.submit(opened)
        elif self._take_grammar(opened):
            self.handoffs.grammar_compiled(opened)

    def _take_grammar(self, opened: OpenCall) -> bool:
        """Of a call whose grammar has been compiled. Ends or answers it if that was refused."""
        assert opened.coming is not None
        if (error := opened.coming.exception()) is None:
            opened.texts = opened.coming.result()
            self.constrained.follow(opened.request.request_id)
            return True
        status = CallStatus.GRAMMAR_LIMIT if isinstance(error, GrammarRefused) else CallStatus.ERROR
        extra = {"event": "grammar_refused", "request": opened.request.request_id, "reason": str(error)}
        logger.warning("a grammar is refused", extra=extra)
        self._metrics.grammar_failed("refused")
        if self.by_id.get(opened.request.request_id) is opened:
            self.end(opened.request.request_id, RequestState.FAILED, status, str(error))
        else:
            self.reply(opened, status, str(error))
        return False

    @property
    def is_compiling(self) -> bool:
        """Whether somebody is here whom the scheduler does not know yet. Any thread."""
        return bool(self._compiling)

    @property
    def next_deadline_s(self) -> float:
        """The earliest of those who wait for their grammars, or infinity."""
        return min(self._compiling.values(), default=math.inf)

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """Of the plan's rows; those who can't follow their grammars are ended. Mutates."""
        masks, strayed = self.constrained.masks(plan)
        for one in strayed:
            self._metrics.grammar_failed("strayed" if one.status is CallStatus.ERROR else "limit")
            self.end(one.request_id, RequestState.FAILED, one.status, one.detail)
        return masks

    def turned(self, turn: Turn, now_s: float) -> None:
        """What a turn decided is told to those concerned."""
        late = [request_id for request_id, deadline_s in self._compiling.items() if deadline_s <= now_s]
        for request_id in (*turn.expired, *late):
            self.end(request_id, RequestState.FAILED, CallStatus.TIMEOUT, "the request's time is up")
        for request in turn.admitted:
            try:
                self._on_admitted(self.by_id[request.request_id])
            except Exception as error:
                self.fail(request.request_id, error)
        for request in turn.evicted:
            detail = f"{request.request_id} gave way: no KV memory, no host memory"
            logger.warning("request evicted", extra={"event": "evicted", "request": request.request_id})
            self.end(request.request_id, RequestState.EVICTED, CallStatus.EVICTED, detail)

    def _on_admitted(self, opened: OpenCall) -> None:
        self.handoffs.admitted(opened)
        if self._frames is not None and not opened.request.hands_over:
            self._frames.add_admitted(opened)

    def _joined(self, opened: OpenCall) -> None:
        """Its KV was read, and it runs."""
        if self._frames is not None and opened.request.search is not None:  # it has had no first token that says so
            self._frames.add_admitted(opened)
        self._metrics.kv_loaded(opened.transfer_s())

    def stepped(self, output: StepOutput, now_s: float, lane: Lane | None = None) -> None:
        """A step's tokens are known: commit them, and pass on what follows. lane: as `EngineCore.commit`."""
        for prompt in output.prompts:
            try:
                self._pass_on_scores(prompt)
            except Exception as error:
                self.fail(prompt.request_id, error)
        events = self._core.commit(output, now_s, lane)
        for accepted in output.accepted:
            if (opened := self.by_id.get(accepted.request_id)) is not None and self._frames is not None:
                self._frames.add_drafts(opened)
        self.constrained.took(events.tokens)
        for token in events.tokens:
            try:
                self._send_token(token)
            except Exception as error:
                self.fail(token.request_id, error)
        for request_id in dict.fromkeys(token.request_id for token in events.tokens if token.finish_reason):
            if request_id in self.by_id and self._scheduler.get(request_id) is None:
                self._finished.append((self.by_id.pop(request_id), CallStatus.OK))
        for part in events.parts:
            try:
                self.handoffs.part_done(part)
            except Exception as error:
                self.fail(part.request_id, error)
        for done in events.prompts:
            self._on_prompt_done(done)

    def _pass_on_scores(self, prompt: PromptLogprobs) -> None:
        opened = self.by_id.get(prompt.request_id)
        if opened is not None and opened.request.hands_over:
            opened.scores += encode_scores(prompt)
        elif opened is not None and self._frames is not None:
            self._frames.add_scores(opened, prompt)

    def _send_token(self, token: Token) -> None:
        opened = self.by_id.get(token.request_id)
        if opened is not None and self._frames is not None:  # else it has failed a token ago
            opened.token_ids[token.choice].append(token.token_id)
            self._frames.add_token(opened, token)

    def _on_prompt_done(self, done: PromptDone) -> None:
        try:
            self.handoffs.prompt_done(done)
        except Exception as error:
            self.fail(done.request_id, error)
            return
        opened = self.by_id[done.request_id]
        if opened.is_reader_checked or not done.block_ids:
            self.answer(opened)

    def flush(self, now_s: float) -> None:
        """What this iteration produced leaves; then the replies, which say how many tokens were sent."""
        self._finished += self.handoffs.moves.offer_stopped(now_s)
        if self._frames is not None:
            self._frames.flush(self._load, now_s, self._give_up)
        for opened, status in self._finished:
            self.reply(opened, status, "")
        self._finished.clear()

    # -- ends --------------------------------------------------------------------------------------

    def fail(self, request_id: str, error: Exception) -> None:
        """What went wrong for one request costs that request only."""
        self._log_failure(request_id, error)
        self.end(request_id, RequestState.FAILED, CallStatus.ERROR, f"{type(error).__name__}: {error}")

    def _fail_new(self, opened: OpenCall, error: Exception) -> None:
        """Likewise, of one that was not taken yet: it may have come as far as the scheduler."""
        request_id = opened.request.request_id
        self._log_failure(request_id, error)
        try:
            if self._scheduler.get(request_id) is opened.request:
                self._scheduler.end(request_id, RequestState.FAILED, time.monotonic())
        finally:
            self.reply(opened, CallStatus.ERROR, f"{type(error).__name__}: {error}")

    def _log_failure(self, request_id: str, error: Exception) -> None:
        extra = {"event": "request_failed", "engine": self._engine, "request": request_id}
        logger.error("a request failed", exc_info=error, extra=extra)

    def end(self, request_id: str, state: RequestState, status: CallStatus, detail: str) -> None:
        """End a request early, whatever its phase. Ignores unknown ones.

        Its call is answered in any case; raises what the scheduler raises: then its books are wrong.
        """
        opened = self.by_id.pop(request_id, None)
        self._compiling.pop(request_id, None)
        try:
            self.handoffs.let_go(request_id, opened, state)
        finally:
            if opened is not None:
                self.reply(opened, status, detail)

    def end_broken(self, request_id: str, status: CallStatus, detail: str) -> None:
        """As `end`, of one that got what is no token."""
        if status is CallStatus.ERROR:  # what it was computed from may be why
            self._scheduler.distrust_request(request_id)
        self.end(request_id, RequestState.FAILED, status, detail)

    def reply(self, opened: OpenCall, status: CallStatus, detail: str) -> None:
        """Answer its call."""
        if isinstance(opened.call, GenerateCall):
            generated = opened.generate_reply(status, detail)
            self._metrics.generation_done(generated)
            opened.reply(generated)
        else:
            prefilled = opened.prefill_reply(status, detail, self._load())
            self._metrics.prompt_done(status, prefilled.queue_s, prefilled.prefill_s)
            opened.reply(prefilled)

    def answer(self, opened: OpenCall) -> None:
        """A prompt is done, and its reader, if it needs one, can be reached."""
        del self.by_id[opened.request.request_id]
        self.reply(opened, CallStatus.OK, "")

    def _give_up(self, router_id: str, status: CallStatus, detail: str) -> None:
        """This router is gone, whatever Serve believes: its requests end."""
        assert self._frames is not None, "only a router that is sent frames is given up"
        theirs = [request_id for request_id, opened in self.by_id.items() if opened.router_id == router_id]
        extra = {"event": "router_given_up", "router": router_id, "num_requests": len(theirs)}
        logger.warning("a router is given up: %s", detail, extra=extra)
        for request_id in theirs:
            self.end(request_id, RequestState.CANCELLED, status, detail)
        self._frames.close(router_id)

    def answer_all(self, status: CallStatus, detail: str) -> None:
        """Every open call, without a look at the scheduler. Raises nothing."""
        for opened, _ in self._finished:
            self.by_id.setdefault(opened.request.request_id, opened)
        self._finished.clear()
        self._compiling.clear()
        self.handoffs.moves.refuse_all(detail)
        while self.by_id:
            request_id, opened = self.by_id.popitem()
            try:
                self.reply(opened, status, detail)
            except Exception as error:
                self._log_failure(request_id, error)
                opened.future.set_exception(error)
