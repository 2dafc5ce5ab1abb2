"""A streamed answer: server-sent events, written as the tokens come."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from cluster.api_error import ApiError
from cluster.http.request_id import request_id_of
from cluster.monitoring.request_timer import RequestTimer, outcome_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from cluster.openai.answer_events import AnswerEvents
    from cluster.text.choice import TextDelta

logger = logging.getLogger(__name__)

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """However it ends, even before it began: its generation is closed, its outcome counted once.

    Whatever is there is written at once, and all of it in one piece: no token waits for another.
    """

    def __init__(
        self,
        first: list[TextDelta],
        deltas: AsyncGenerator[list[TextDelta], None],
        events: AnswerEvents,
        timer: RequestTimer,
    ) -> None:
        """events: what the deltas are written as."""
        self._first, self._deltas = first, deltas
        self._written, self._timer = events, timer
        self._reasons: list[str] = []
        self._request_id = ""
        self._state: dict[str, Any] = {}
        self._outcome = "cancelled"  # unless it comes to another end
        self._bytes = self._events()
        super().__init__(self._bytes, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id, self._state = request_id_of(scope), scope.setdefault("state", {})
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            # Not left to the generators' own `finally`: one that waits for its consumer ends when it is collected.
            self._timer.over(self._outcome, self._reasons)
            await self._bytes.aclose()
            await self._deltas.aclose()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            if events := self._events_of(self._first):
                yield events
            async for deltas in self._deltas:
                if events := self._events_of(deltas):
                    yield events
            end = self._written.end()
            self._outcome = "ok"
            yield end
        except ApiError as error:
            self._outcome = outcome_of(error)
            self._state["error_code"] = error.code
            yield self._written.failed(error)
        except Exception:
            self._outcome = "server_error"
            logger.exception("stream failed", extra={"event": "stream_failed", "request_id": self._request_id})
            yield self._written.failed(ApiError(500, "internal error; the server's log has more"))

    def _events_of(self, deltas: list[TextDelta]) -> bytes:
        self._reasons += [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
        return self._written.of(deltas)
