"""Bytes of the calls that routers make and of their replies. No torch.

msgpack of a dataclass' fields by name, checked against their types (msgspec). Nothing is unpickled, and no name in the
bytes is ever looked up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import msgspec

from replicas.channels.outbox import prompt_parts
from scheduler.token_logprobs import PromptLogprobs, TokenLogprobs

# A prompt of a million tokens takes 5 MB. More in one message would break the connection, with all calls on it.
MAX_MESSAGE_BYTES = 32 << 20

_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()


class MalformedCall(ValueError):
    """These bytes are not what they should be. The text says which field."""


class NotSendable(ValueError):
    """This message cannot be sent to anybody: its bytes are too many, or a value has none."""


def encode(message: Any) -> bytes:
    """Of a call or a reply. Does not block. Raises NotSendable."""
    try:
        payload = _ENCODER.encode(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise NotSendable(f"{type(message).__name__}: {type(error).__name__}") from error
    if len(payload) > MAX_MESSAGE_BYTES:
        raise NotSendable(f"{type(message).__name__} of {len(payload)} bytes, the most are {MAX_MESSAGE_BYTES}")
    return payload


class Decoder(Generic[_T]):
    """Makes messages of one type out of bytes."""

    def __init__(self, kind: type[_T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def __call__(self, payload: bytes) -> _T:
        """Raises MalformedCall, and nothing else."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise MalformedCall(str(error)) from None


_SCORES: Decoder[tuple[TokenLogprobs | None, ...]] = Decoder(tuple[TokenLogprobs | None, ...])


def encode_scores(prompt: PromptLogprobs) -> tuple[bytes, ...]:
    """Parts of a prompt's positions, each short enough to be decoded on an event loop."""
    return tuple(encode(part.positions) for part in prompt_parts(prompt))


def decode_scores(payload: bytes) -> tuple[TokenLogprobs | None, ...]:
    """Of one part. Raises MalformedCall, and nothing else."""
    return _SCORES(payload)


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where a replica takes calls, and its CURVE public key (Z85 text).

    Nobody can connect without the key, and it never travels over that connection: it is a secret of the cluster, told
    in the replica's metadata, not logged and not shown.
    """

    endpoint: str
    public_key: str

    def to_metadata(self) -> dict[str, str]:
        return asdict(self)
