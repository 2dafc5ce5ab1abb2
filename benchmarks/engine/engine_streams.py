"""Requests through a running engine: real calls in, real frames out, no router and no Ray."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from replicas.channels.token_receiver import TokenReceiver
from replicas.messages import CallStatus, Frame, GenerateCall, GenerationSpec
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.engine.engine import Engine

_TAIL_S = 10.0  # the last frame may come after the reply that counts its tokens


@dataclass(slots=True)
class Stream:
    """Tokens of one request and when each arrived at the other end of the token channel."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """After the first token: decoding only."""
        return (len(self.times_s) - 1) / (self.times_s[-1] - self.times_s[0])


def steady_tokens_per_s(streams: list[Stream]) -> float:
    """Over the time in which every stream was decoding: after the last first token, until the first end."""
    start_s = max(stream.times_s[0] for stream in streams)
    end_s = min(stream.times_s[-1] for stream in streams)
    if end_s <= start_s:
        raise ValueError("the streams were never all decoding: more max_tokens are needed")
    return sum(start_s < time_s <= end_s for stream in streams for time_s in stream.times_s) / (end_s - start_s)


class EngineStreams:
    """A context: one token channel to one running engine, on an event loop that runs only within `run`.

    One channel for all runs: an engine keeps trying to reach a receiver that has gone, and that would be measured.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = asyncio.Runner()
        self._streams: dict[str, Stream] = {}
        self._receiver = TokenReceiver(f"benchmark-{uuid.uuid4().hex[:8]}", "127.0.0.1", self._on_frame, _on_gap)

    def __enter__(self) -> Self:
        self._runner.run(self._receiver.start())
        self._receiver.allow(self._engine.sender.public_key)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.run(self._receiver.stop())
        self._runner.close()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: SamplingParams) -> list[Stream]:
        """All at once, each to its end; the engine prefills by itself. Blocks. Raises RuntimeError when one fails."""
        return self._runner.run(self._run(prompts, max_tokens, sampling))

    def found(self, specs: Sequence[GenerationSpec]) -> list[int]:
        """One after another: how many tokens of each prompt were in the engine's prefix cache. Blocks. Raises
        RuntimeError when one fails."""
        return self._runner.run(self._found(specs))

    async def _found(self, specs: Sequence[GenerationSpec]) -> list[int]:
        found = []
        for spec in specs:
            name = uuid.uuid4().hex
            self._streams, self._num_missing, self._complete = {name: Stream()}, spec.max_tokens, asyncio.Event()
            call = GenerateCall(name, spec, timeout_s=600.0, channel=self._receiver.address, source=None)
            reply = await asyncio.wrap_future(self._engine.generate(call))
            if reply.status is not CallStatus.OK:
                raise RuntimeError(f"{reply.status}: {reply.detail}")
            async with asyncio.timeout(_TAIL_S):
                await self._complete.wait()
            found.append(reply.num_cached)
        return found

    async def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: SamplingParams) -> list[Stream]:
        self._streams = {uuid.uuid4().hex: Stream() for _ in prompts}
        self._num_missing = len(prompts) * max_tokens
        self._complete = asyncio.Event()
        calls = [
            GenerateCall(
                name,
                GenerationSpec(tuple(prompt), (0,), max_tokens, frozenset(), sampling),
                timeout_s=600.0,
                channel=self._receiver.address,
                source=None,
            )
            for name, prompt in zip(self._streams, prompts, strict=True)
        ]
        replies = await asyncio.gather(*(asyncio.wrap_future(self._engine.generate(call)) for call in calls))
        for reply in replies:
            if reply.status is not CallStatus.OK:
                raise RuntimeError(f"{reply.status}: {reply.detail}")
        async with asyncio.timeout(_TAIL_S):
            await self._complete.wait()
        return list(self._streams.values())

    def _on_frame(self, frame: Frame) -> None:
        now_s = time.monotonic()
        for item in frame.tokens:
            stream = self._streams[item.request_id]
            stream.tokens.append(item.token_id)
            stream.times_s.append(now_s)
            self._num_missing -= 1
        if frame.tokens and not self._num_missing:
            self._complete.set()


def _on_gap(replica_id: str, epoch: str, from_seq: int) -> None:
    raise AssertionError(f"frames of {replica_id} from {from_seq} are missing")
