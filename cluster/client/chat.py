"""A conversation with a chat model, and how fast its answers came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.client.api_client import ApiClient


@dataclass(frozen=True, slots=True)
class AnswerSpeed:
    """ttft_s: until the first text; None if none came. tokens_per_s: after it; None of a single token."""

    num_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None
    is_cut: bool  # it had as many tokens as it may, and would have gone on

    def __str__(self) -> str:
        if self.ttft_s is None:
            return f"{self.num_tokens} tokens, no text"
        speed = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s is not None else ""
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        return f"{tokens}, first after {self.ttft_s:.2f} s{speed}{', cut at its limit' if self.is_cut else ''}"


class Chat:
    """Keeps what was said. One thread."""

    def __init__(
        self,
        client: ApiClient,
        model: str,
        max_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        temperature: float | None = None,
    ) -> None:
        """max_tokens, temperature: of each answer; None: as the server decides."""
        self._client, self._model, self._max_tokens, self._clock = client, model, max_tokens, clock
        self._temperature = temperature
        self._system: str | None = None
        self._said: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget what was said, but not the system message."""
        self._said = []

    def set_system(self, text: str) -> None:
        """What the model is told before everything else; an empty text: nothing. Begins anew."""
        self._system = text or None
        self.reset()

    def ask(self, text: str, show: Callable[[str], None]) -> AnswerSpeed:
        """show: takes pieces of the answer as they come. Blocks. Raises UserError; then, and when it is interrupted,
        the conversation is what it was before."""
        asked = [*self._said, {"role": "user", "content": text}]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        body: dict[str, Any] = {"model": self._model, "messages": system + asked}
        body["stream_options"] = {"include_usage": True}
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        if self._temperature is not None:
            body["temperature"] = self._temperature
        sent_s = self._clock()
        first_s = last_s = None
        pieces: list[str] = []
        num_tokens, reason = 0, None
        for event in self._client.chat_events(body):
            for choice in event.get("choices") or ():
                reason = choice.get("finish_reason") or reason
                if piece := (choice.get("delta") or {}).get("content"):
                    last_s = self._clock()
                    first_s = last_s if first_s is None else first_s
                    pieces.append(piece)
                    show(piece)
            if usage := event.get("usage"):
                num_tokens = usage.get("completion_tokens", 0)
        self._said = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        rate = None
        if first_s is not None and last_s is not None and last_s > first_s and num_tokens > 1:
            rate = (num_tokens - 1) / (last_s - first_s)
        return AnswerSpeed(num_tokens, None if first_s is None else first_s - sent_s, rate, reason == "length")
