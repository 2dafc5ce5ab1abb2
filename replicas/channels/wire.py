"""Bytes of all that crosses between processes: calls and replies, token frames, NIXL notifications. No torch.

msgpack of the types in `messages`, each field checked against its type and range (msgspec). What is not what an encoder
here produces raises `MalformedMessage`. Nothing is unpickled, and no name in the bytes is ever looked up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from replicas.channels.outbox import prompt_parts
from replicas.messages import Dispute, Frame, Handoff, PromptLogprobs, TokenLogprobs, TransferNote

# A prompt of a million tokens takes 5 MB. More in one message would break the connection, with all calls on it.
MAX_MESSAGE_BYTES = 32 << 20
# Of a frame or a notification. The handoff of 128k tokens in blocks of 8 has 213 KB, that of a million has 1.7 MB.
# NIXL has carried 32 MiB, and 200 KB within a millisecond.
MAX_STREAMED_BYTES = 8 << 20

_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()


class MalformedMessage(ValueError):
    """These bytes are not what they should be. The text says where."""


class NotSendable(ValueError):
    """This message cannot be sent to anybody: its bytes are too many, or a value has none."""


def encode(message: Any) -> bytes:
    """Of any of the messages. Does not block. Raises NotSendable."""
    try:
        payload = _ENCODER.encode(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise NotSendable(f"{type(message).__name__}: {type(error).__name__}") from error
    if len(payload) > MAX_MESSAGE_BYTES:
        raise NotSendable(f"{type(message).__name__} of {len(payload)} bytes, the most are {MAX_MESSAGE_BYTES}")
    return payload


class Decoder(Generic[_T]):
    """Makes messages of one type, or of one of several, out of bytes."""

    def __init__(self, kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """kind: the type, or a union of types with tags. max_bytes: of one message."""
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes

    def __call__(self, payload: bytes) -> _T:
        """Raises MalformedMessage, and nothing else."""
        if len(payload) > self._max_bytes:
            raise MalformedMessage(f"{len(payload)} bytes are more than {self._max_bytes}")
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise MalformedMessage(str(error)) from None


_FRAME: Decoder[Frame] = Decoder(Frame, MAX_STREAMED_BYTES)
_SCORES: Decoder[tuple[TokenLogprobs | None, ...]] = Decoder(tuple[TokenLogprobs | None, ...])
_NOTIFICATION: Decoder[Handoff | TransferNote | Dispute] = Decoder(Handoff | TransferNote | Dispute, MAX_STREAMED_BYTES)


def decode_frame(payload: bytes) -> Frame:
    """Raises MalformedMessage, and nothing else."""
    frame = _FRAME(payload)
    for item in frame.tokens:
        if item.logprobs is not None:
            _check(item.logprobs)
    for prompt in frame.prompts:
        if prompt.start < 0:
            raise MalformedMessage("a prompt's first position is negative")
        _check_all(prompt.positions)
    return frame


def decode_notification(payload: bytes) -> Handoff | TransferNote | Dispute:
    """Raises MalformedMessage, and nothing else."""
    return _NOTIFICATION(payload)


def encode_scores(prompt: PromptLogprobs) -> tuple[bytes, ...]:
    """Parts of a prompt's positions, each short enough to be decoded on an event loop."""
    return tuple(encode(part.positions) for part in prompt_parts(prompt))


def decode_scores(payload: bytes) -> tuple[TokenLogprobs | None, ...]:
    """Of one part. Raises MalformedMessage, and nothing else."""
    positions = _SCORES(payload)
    _check_all(positions)
    return positions


def _check_all(positions: Sequence[TokenLogprobs | None]) -> None:
    for scored in positions:
        if scored is not None:
            _check(scored)


def _check(scored: TokenLogprobs) -> None:
    """The ranges: scheduler/ can't state them in the type."""
    total = scored.logprob
    for token_id, logprob in scored.top:
        if token_id < 0:
            raise MalformedMessage("a token id is negative")
        total += logprob
    if not math.isfinite(total):
        raise MalformedMessage("a log-probability is not finite")
