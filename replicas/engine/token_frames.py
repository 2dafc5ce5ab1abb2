"""Frames for the routers: what an iteration has for each of them, and who does not take his any more."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from replicas.channels.outbox import Outbox, Parts
from replicas.engine.open_call import OpenCall
from replicas.messages import CallStatus, EngineLoad, PromptLogprobs, Token

if TYPE_CHECKING:
    from replicas.channels.token_sender import TokenSender

logger = logging.getLogger(__name__)

# A channel that was just opened takes frames only after its handshake, and nothing tells when: ask again soon.
_UNSENT_POLL_S = 0.005


class TokenFrames:
    """Engine thread only. idle_frame_s: how long a router hears nothing at most."""

    def __init__(self, sender: TokenSender, idle_frame_s: float) -> None:
        self.sender = sender
        self._idle_frame_s = idle_frame_s
        self._outbox: defaultdict[str, Outbox] = defaultdict(Outbox)  # by router
        self._last_sent_s: dict[str, float] = {}  # by router

    # What leaves with the next flush.

    def add_admitted(self, opened: OpenCall) -> None:
        self._outbox[opened.router_id].admitted.append(opened.request.request_id)

    def add_scores(self, opened: OpenCall, prompt: PromptLogprobs) -> None:
        self._outbox[opened.router_id].prompts.append(prompt)

    def add_token(self, opened: OpenCall, token: Token) -> None:
        if not opened.num_sent and opened.request.num_cached and not opened.request.num_generated:
            self._outbox[opened.router_id].cached.append((opened.request.request_id, opened.request.num_cached))
        opened.num_sent[token.choice] += 1
        if not token.index and opened.first_token_s is None and opened.request.search is None:
            opened.first_token_s = time.monotonic()
        self._outbox[opened.router_id].tokens.append(token)

    def add_drafts(self, opened: OpenCall) -> None:
        """How its drafts turned out so far, if its client said what it expects."""
        request = opened.request
        if request.spec.predicted_ids:
            counts = (request.request_id, request.speculation.num_drafted, request.speculation.num_accepted)
            self._outbox[opened.router_id].drafted.append(counts)

    def flush(
        self, load: Callable[[], EngineLoad], now_s: float, give_up: Callable[[str, CallStatus, str], None]
    ) -> None:
        """A frame or some per router that has something, or that has not heard of us for a while. load: as it is now,
        asked for if there is a frame. give_up: is told of routers that don't take them, and calls `close`.
        """
        silent = [
            router_id
            for router_id, sent_s in self._last_sent_s.items()
            if router_id not in self._outbox and now_s - sent_s >= self._idle_frame_s
        ]
        if silent or self._outbox:
            told = load()
            for router_id in silent:
                self._send(router_id, told, (((), (), (), (), ()),), now_s, give_up)
            for router_id, outbox in self._outbox.items():
                self._send(router_id, told, outbox.parts(), now_s, give_up)
            self._outbox.clear()
        self.sender.flush()
        for router_id in self.sender.stalled_routers(now_s):
            give_up(router_id, CallStatus.CANCELLED, "the router's channel stayed away")

    def close(self, router_id: str) -> None:
        """Nothing is sent there any more. Mutates."""
        self.sender.close(router_id)
        self._last_sent_s.pop(router_id, None)

    def idle_s(self, longest_s: float) -> float:
        """How long nothing needs to be sent, at most longest_s."""
        if self.sender.has_unsent:
            return _UNSENT_POLL_S
        return self._idle_frame_s if self._last_sent_s else longest_s

    def _send(
        self,
        router_id: str,
        load: EngineLoad,
        parts: Iterable[Parts],
        now_s: float,
        give_up: Callable[[str, CallStatus, str], None],
    ) -> None:
        try:
            for part in parts:
                self.sender.send(router_id, load, *part)
            self._last_sent_s[router_id] = now_s
        except Exception as error:  # what is wrong with one router's frames is no other's
            logger.exception("frames could not be sent", extra={"event": "send_failed", "router": router_id})
            give_up(router_id, CallStatus.ERROR, f"its router's channel failed: {type(error).__name__}")
