"""A token that a model generated: one type on its whole way, from the commit of its step to the detokeniser."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from scheduler.token_logprobs import TokenLogprobs


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token id; the token itself is the last one
    LENGTH = "length"  # max_tokens reached


class Token(NamedTuple):
    """index counts from 0 within its choice, in this attempt; finish_reason is set on a choice's last one.

    A tuple, as one is made for each token there is: a frozen dataclass takes three times as long. (msgspec's structs,
    which take a third of it, are not of the standard library. This way one is made and one decoded for each token, and
    nothing is copied from one type to another: see docs/control-path.md.)
    """

    request_id: str
    choice: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
