"""Bytes of what streams: token frames (ZeroMQ) and NIXL notifications. No torch.

A message is one msgpack array: version, tag, then the dataclass's fields in order. Decoding checks every field's
exact type and range, and the length of every array: whatever is not precisely what an encoder here produces raises
`MalformedMessage`. Nothing is unpickled, and no name in the bytes is ever looked up.
"""

from __future__ import annotations

import math
from typing import NoReturn, TypeVar

import msgpack

from replicas.messages import (
    EngineLoad,
    FinishReason,
    FirstToken,
    Frame,
    Handoff,
    NoteKind,
    PromptLogprobs,
    TokenItem,
    TokenLogprobs,
    TransferNote,
)
from scheduler.admission import LATER_STEPS

WIRE_VERSION = 2

_T = TypeVar("_T")

_FRAME, _HANDOFF, _NOTE = 1, 2, 3  # tags
_MAX_BYTES = 8 << 20  # of one message; a 128k-token prompt's handoff is about 50 KB
_MAX_TEXT = 4096  # characters of one string
_MAX_DIGEST = 64
_MAX_COUNT = (1 << 63) - 1
_FINISH: dict[object, FinishReason | None] = {None: None, **{reason.value: reason for reason in FinishReason}}
_NOTE_KINDS: dict[object, NoteKind] = {kind.value: kind for kind in NoteKind}


class MalformedMessage(ValueError):
    """These bytes are not a message of this version. The text says which field."""


def encode_frame(frame: Frame) -> bytes:
    """Does not block; raises nothing for a well-typed frame."""
    load = frame.load
    return _pack(
        (
            WIRE_VERSION,
            _FRAME,
            frame.replica_id,
            frame.epoch,
            frame.seq,
            (
                load.num_running,
                load.num_queued,
                load.queued_prompt_tokens,
                load.free_blocks,
                load.total_blocks,
                float(load.step_s),
                float(load.prefill_tokens_per_s),
                load.later_free_blocks,
                load.expected_tokens,
            ),
            frame.admitted,
            frame.tokens,
            [(p.request_id, p.start, p.positions) for p in frame.prompts],
        )
    )


def decode_frame(payload: bytes) -> Frame:
    """Raises MalformedMessage, and nothing else."""
    fields = _unpack(payload, {_FRAME: 7})
    return Frame(
        replica_id=_text(fields[2], "replica_id"),
        epoch=_text(fields[3], "epoch"),
        seq=_count(fields[4], "seq"),
        load=_load(fields[5]),
        admitted=tuple(_text(item, "admitted") for item in _array(fields[6], "admitted")),
        tokens=tuple(_token_item(item) for item in _array(fields[7], "tokens")),
        prompts=tuple(_prompt(item) for item in _array(fields[8], "prompts")),
    )


def encode_notification(message: Handoff | TransferNote) -> bytes:
    """Does not block; raises nothing for a well-typed message."""
    if isinstance(message, TransferNote):
        note = (message.kind, message.transfer_id, message.source_epoch, message.reader_epoch, message.reason)
        return _pack((WIRE_VERSION, _NOTE, *note))
    return _pack(
        (
            WIRE_VERSION,
            _HANDOFF,
            message.transfer_id,
            message.source_epoch,
            message.reader_epoch,
            message.fingerprint,
            message.block_ids,
            message.prompt_len,
            message.digest,
            [(first.choice, first.token_id, first.finish_reason) for first in message.first_tokens],
            float(message.lease_s),
            message.candidates,
        )
    )


def decode_notification(payload: bytes) -> Handoff | TransferNote:
    """Raises MalformedMessage, and nothing else."""
    fields = _unpack(payload, {_HANDOFF: 10, _NOTE: 5})
    return _note(fields) if fields[1] == _NOTE else _handoff(fields)


def _note(fields: list[object]) -> TransferNote:
    return TransferNote(
        kind=_choice(_NOTE_KINDS, fields[2], "kind"),
        transfer_id=_text(fields[3], "transfer_id"),
        source_epoch=_text(fields[4], "source_epoch"),
        reader_epoch=_text(fields[5], "reader_epoch"),
        reason=_text(fields[6], "reason"),
    )


def _handoff(fields: list[object]) -> Handoff:
    lease_s = _amount(fields[10], "lease_s")
    if lease_s == 0.0:
        _refuse("lease_s is zero")
    digest = fields[8]
    if digest is not None and (type(digest) is not bytes or not 0 < len(digest) <= _MAX_DIGEST):
        _refuse("digest is not bytes of a sensible length")
    return Handoff(
        transfer_id=_text(fields[2], "transfer_id"),
        source_epoch=_text(fields[3], "source_epoch"),
        reader_epoch=_text(fields[4], "reader_epoch"),
        fingerprint=_text(fields[5], "fingerprint"),
        block_ids=tuple(_count(item, "block_ids") for item in _array(fields[6], "block_ids")),
        prompt_len=_count(fields[7], "prompt_len"),
        digest=digest,
        first_tokens=tuple(_first_token(item) for item in _array(fields[9], "first_tokens")),
        lease_s=lease_s,
        candidates=_token_scores(fields[11], "candidates"),
    )


def _first_token(value: object) -> FirstToken:
    item = _array(value, "first_tokens", length=3)
    return FirstToken(
        choice=_count(item[0], "choice"),
        token_id=_count(item[1], "token_id"),
        finish_reason=_choice(_FINISH, item[2], "finish_reason"),
    )


def _token_item(value: object) -> TokenItem:
    """Written flat: it runs once per generated token in every router."""
    if type(value) is not list or len(value) != 6:
        _refuse("tokens has an item that is no array of 6 fields")
    request_id, choice, index, token_id, finish, logprobs = value
    if type(request_id) is not str or len(request_id) > _MAX_TEXT:
        _refuse("request_id is not a text of sensible length")
    if not (type(choice) is type(index) is type(token_id) is int):
        _refuse("choice, index and token_id are not integers")
    if not (0 <= choice <= _MAX_COUNT and 0 <= index <= _MAX_COUNT and 0 <= token_id <= _MAX_COUNT):
        _refuse("choice, index or token_id is out of range")
    reason = None if finish is None else _choice(_FINISH, finish, "finish_reason")
    return TokenItem(request_id, choice, index, token_id, reason, None if logprobs is None else _logprobs(logprobs))


def _packed(value: object) -> tuple[object, ...]:
    """What msgpack does not know itself."""
    if not isinstance(value, TokenLogprobs):
        raise TypeError(f"{type(value).__name__} has no place in a message")
    return value.logprob, value.top


def _prompt(value: object) -> PromptLogprobs:
    item = _array(value, "prompts", length=3)
    return PromptLogprobs(
        request_id=_text(item[0], "request_id"),
        start=_count(item[1], "start"),
        positions=tuple(_logprobs(position) for position in _array(item[2], "positions")),
    )


def _logprobs(value: object) -> TokenLogprobs | None:
    if value is None:
        return None
    logprob, top = _array(value, "logprobs", length=2)
    return TokenLogprobs(_logprob(logprob), _token_scores(top, "top"))


def _token_scores(value: object, field: str) -> tuple[tuple[int, float], ...]:
    pairs = [_array(pair, field, length=2) for pair in _array(value, field)]
    return tuple((_count(token_id, "token_id"), _logprob(logprob)) for token_id, logprob in pairs)


def _load(value: object) -> EngineLoad:
    item = _array(value, "load", length=9)
    later_free_blocks = tuple(_count(free, "later_free_blocks") for free in _array(item[7], "later_free_blocks"))
    if len(later_free_blocks) > len(LATER_STEPS):
        _refuse("later_free_blocks are more than there are steps for them")
    return EngineLoad(
        num_running=_count(item[0], "num_running"),
        num_queued=_count(item[1], "num_queued"),
        queued_prompt_tokens=_count(item[2], "queued_prompt_tokens"),
        free_blocks=_count(item[3], "free_blocks"),
        total_blocks=_count(item[4], "total_blocks"),
        step_s=_amount(item[5], "step_s"),
        prefill_tokens_per_s=_amount(item[6], "prefill_tokens_per_s"),
        later_free_blocks=later_free_blocks,
        expected_tokens=_count(item[8], "expected_tokens"),
    )


def _pack(message: tuple[object, ...]) -> bytes:
    packed: bytes = msgpack.packb(message, default=_packed)
    return packed


def _unpack(payload: bytes, num_fields: dict[int, int]) -> list[object]:
    """The message's array, its version, tag and length checked. num_fields: tag -> fields after the tag."""
    if len(payload) > _MAX_BYTES:
        _refuse(f"{len(payload)} bytes are more than {_MAX_BYTES}")
    try:
        message = msgpack.unpackb(payload, raw=False, use_list=True, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {error}") from error
    fields = _array(message, "message")
    if len(fields) < 2 or type(fields[0]) is not int or fields[0] != WIRE_VERSION:
        _refuse(f"not wire version {WIRE_VERSION}")
    tag = fields[1]
    if type(tag) is not int or tag not in num_fields:
        _refuse("unknown tag")
    if len(fields) != num_fields[tag] + 2:
        _refuse("wrong number of fields")
    return fields


def _refuse(text: str) -> NoReturn:
    raise MalformedMessage(text)


def _array(value: object, field: str, length: int | None = None) -> list[object]:
    if type(value) is not list:
        _refuse(f"{field} is not an array")
    if length is not None and len(value) != length:
        _refuse(f"{field} has {len(value)} fields, not {length}")
    return value


def _text(value: object, field: str) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        _refuse(f"{field} is not a text of at most {_MAX_TEXT} characters")
    return value


def _count(value: object, field: str) -> int:
    # type(), not isinstance(): True is an int too.
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        _refuse(f"{field} is not an integer from 0 to 2^63 - 1")
    return value


def _amount(value: object, field: str) -> float:
    if type(value) is not float or not math.isfinite(value) or value < 0.0:
        _refuse(f"{field} is not a finite, non-negative float")
    return value


def _logprob(value: object) -> float:
    if type(value) is not float or not math.isfinite(value):
        _refuse("a log-probability is not a finite float")
    return value


def _choice(table: dict[object, _T], value: object, field: str) -> _T:
    # The type is checked first: an unhashable value must not raise TypeError here.
    if not (value is None or type(value) is str) or value not in table:
        _refuse(f"{field} has an unknown value")
    return table[value]
