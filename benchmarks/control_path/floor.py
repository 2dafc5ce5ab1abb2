"""What Ray Serve alone costs for the same HTTP work: the floor under every figure of the real path.

An ASGI app on the same cluster. No tokenizer, router, channel or text; chunks are made once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


class FloorIngress:
    """Paths: /nop; /calls, which makes two Serve calls in a row; /v1/completions."""

    def __init__(self, prefill: Any, step_s: float) -> None:
        self._prefill = prefill
        self._clock = StepClock(step_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI()

        @app.post("/nop/v1/completions")
        async def nop(request: Request) -> Response:
            await request.body()
            return _whole()

        @app.post("/calls/v1/completions")
        async def calls(request: Request) -> Response:
            await self._two_calls(await request.body())
            return _whole()

        @app.post("/stream/v1/completions")
        async def stream(request: Request) -> StreamingResponse:
            body = orjson.loads(await request.body())
            return StreamingResponse(self._events(body["max_tokens"]), media_type="text/event-stream")

        return app

    async def _two_calls(self, payload: bytes) -> None:
        """As many as a request makes one after the other."""
        for _ in range(2):
            await self._prefill.options(method_name="nothing").remote(payload)

    async def _events(self, num_tokens: int) -> AsyncIterator[bytes]:
        for _ in range(num_tokens):
            await self._clock.next_step()
            yield _CHUNK
        yield _FINISH
        yield _usage(num_tokens)
        yield b"data: [DONE]\n\n"


class StepClock:
    """All streams wait for the same steps, as tokens of one batch come together."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def next_step(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def _run(self) -> None:
        next_s = time.monotonic()
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
            # Time that was lost is not made up for: a real step would not be shorter either.
            next_s = max(next_s + self._step_s, time.monotonic())
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))


def _chunk(text: str, finish_reason: str | None, **more: Any) -> bytes:
    """As our ingress writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1_700_000_000, "model": "stub"}
    return b"data: " + orjson.dumps({**head, "choices": [choice], "usage": None, **more}) + b"\n\n"


_CHUNK = _chunk(" the", None)
_FINISH = _chunk("", "length")


def _usage(num_tokens: int) -> bytes:
    return _chunk("", None, choices=[], usage={"prompt_tokens": 1, "completion_tokens": num_tokens})


def _whole() -> Response:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    body = {"choices": [{"index": 0, "text": " the the", "finish_reason": "length"}], "usage": usage}
    return Response(orjson.dumps(body), media_type="application/json")
