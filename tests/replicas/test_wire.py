"""What is encoded comes back equal; anything else is refused as MalformedMessage, whatever the bytes are."""

from __future__ import annotations

import pickle
import random
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.channels.wire import Decoder, MalformedMessage, decode_frame, decode_notification, decode_scores, encode
from replicas.messages import (
    WIRE_VERSION,
    CallStatus,
    Dispute,
    EngineLoad,
    FinishReason,
    Frame,
    GenerateReply,
    Handoff,
    MovedChoice,
    NoteKind,
    PrefillReply,
    PromptLogprobs,
    Token,
    TokenLogprobs,
    TransferNote,
)

counts = st.integers(0, 2**63 - 1)
some_counts = st.lists(counts, max_size=9).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=40)
finishes = st.sampled_from([None, *FinishReason])
seconds = st.floats(0, 1e9)
loads = st.builds(
    EngineLoad,
    counts,
    counts,
    counts,
    counts,
    counts,
    seconds,
    seconds,
    st.lists(counts, max_size=4).map(tuple),
    counts,
)
logprobs = st.floats(-9999.0, 0.0)
scores = st.none() | st.builds(TokenLogprobs, logprobs, st.lists(st.tuples(counts, logprobs), max_size=3).map(tuple))
items = st.builds(Token, names, counts, counts, counts, finishes, scores)
prompts = st.builds(PromptLogprobs, names, counts, st.lists(scores, max_size=3).map(tuple))
frames = st.builds(
    Frame,
    names,
    names,
    counts,
    loads,
    st.lists(names, max_size=4).map(tuple),
    st.lists(items, max_size=5).map(tuple),
    st.lists(prompts, max_size=2).map(tuple),
    st.lists(st.tuples(names, counts), max_size=3).map(tuple),
    st.lists(st.tuples(names, counts, counts), max_size=3).map(tuple),
)
handoffs = st.builds(
    Handoff,
    names,
    names,
    names,
    names,
    st.lists(counts, max_size=20).map(tuple),
    counts,
    st.none() | st.binary(max_size=160),
    st.lists(st.builds(Token, names, counts, counts, counts, finishes, st.none()), max_size=4).map(tuple),
    st.floats(1e-6, 1e6),
    st.lists(st.tuples(counts, logprobs), max_size=4).map(tuple),
    counts,
    st.booleans(),
    st.lists(st.builds(MovedChoice, counts, some_counts, some_counts), max_size=3).map(tuple),
)
notes = st.builds(TransferNote, st.sampled_from(NoteKind), names, names, names, names, counts)
disputes = st.builds(Dispute, names, names, names, st.lists(counts, min_size=1, max_size=20).map(tuple))

FRAME = Frame(
    "decode-0",
    "e1",
    7,
    EngineLoad(1, 2, 3, 4, 5, 0.01, 8.0, (6, 7), 9, "prefill-1", 5e8),
    ("r2",),
    (Token("r1", 0, 3, 42, FinishReason.STOP),),
    (),
    (("r1", 32),),
    (("r1", 12, 9),),
)
HANDOFF = Handoff("t", "s", "r", "f", (3, 4), 30, b"d" * 16, (Token("t", 0, 0, 9, None),), 5.0, ((7, -0.5),), 0, True)
NOTE = TransferNote(NoteKind.DONE, "t", "s", "r", "", 0)


@settings(max_examples=60, deadline=None)
@given(frames)
def test_frame_round_trip(frame: Frame) -> None:
    assert decode_frame(encode(frame)) == frame


@settings(max_examples=60, deadline=None)
@given(handoffs | notes | disputes)
def test_notification_round_trip(message: Handoff | TransferNote | Dispute) -> None:
    decoded = decode_notification(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_decoded_enums_are_enums() -> None:
    assert decode_frame(encode(FRAME)).tokens[0].finish_reason is FinishReason.STOP
    note = decode_notification(encode(NOTE))
    assert isinstance(note, TransferNote)
    assert note.kind is NoteKind.DONE


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    for decode in (decode_frame, decode_notification):
        with pytest.raises(MalformedMessage):
            decode(payload)


def test_flipped_bytes_are_refused_or_stay_well_typed() -> None:
    rng = random.Random(5)
    for message in (encode(FRAME), encode(HANDOFF), encode(NOTE)):
        refused = 0
        for _ in range(400):
            mutated = bytearray(message)
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            for decode in (decode_frame, decode_notification):
                try:
                    decoded: Any = decode(bytes(mutated))
                except MalformedMessage:
                    refused += 1
                else:
                    assert decode(encode(decoded)) == decoded
        assert refused > 400  # the other decoder refuses always


def test_a_load_from_more_steps_than_are_known_is_refused() -> None:
    fields = _fields(encode(FRAME))
    fields[4]["later_free_blocks"] = [1] * 5
    with pytest.raises(MalformedMessage, match="later_free_blocks"):
        decode_frame(msgpack.packb(fields))


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_truncated_or_extended_is_refused(cut: int) -> None:
    payload = encode(HANDOFF)
    with pytest.raises(MalformedMessage):
        decode_notification(payload[:cut])
    with pytest.raises(MalformedMessage):
        decode_notification(payload + b"\x00")


def _fields(payload: bytes) -> list[Any]:
    fields = msgpack.unpackb(payload)
    assert isinstance(fields, list)
    return fields


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, f"handoff-{WIRE_VERSION + 1}"),
        (0, True),
        (0, f"note-{WIRE_VERSION}"),  # a note's tag on a handoff
        (0, 99),
        (1, 7),
        (1, b"t"),
        (1, "x" * 5000),
        (5, [1, -1]),
        (5, [1, True]),
        (5, [1, 2.0]),
        (5, "12"),
        (6, 2**63),
        (6, None),
        (7, "digest"),
        (7, 8),
        (8, [[0, 1, None]]),
        (8, [["t", 0, 0, 1]]),
        (8, [["t", 0, 0, 1, "exploded"]]),
        (8, [["t", 0, 0, 1, []]]),
        (8, [["t", 0, 0, -1, None]]),
        (8, [["t", -1, 0, 1, None]]),
        (8, [["t", 0, 0, 1, None, None, None]]),
        (8, [{"request_id": "t", "choice": 0, "index": 0, "token_id": 1, "finish_reason": None}]),
        (8, {"choice": 0}),
        (9, "5"),
        (9, 0.0),
        (9, 0),
        (9, -1.0),
        (9, float("nan")),
        (9, float("inf")),
        (10, [[1]]),
        (10, [[-1, -0.5]]),
        (10, [[1, float("nan")]]),
        (11, -1),
        (11, True),
        (11, None),
        (12, 1),
        (12, None),
    ],
)
def test_every_field_is_checked(index: int, value: object) -> None:
    fields = _fields(encode(HANDOFF))
    fields[index] = value
    with pytest.raises(MalformedMessage):
        decode_notification(msgpack.packb(fields))


@pytest.mark.parametrize("block_ids", [[], [-1], ["1"], 1, None])
def test_a_dispute_names_blocks(block_ids: object) -> None:
    fields = _fields(encode(Dispute("t", "s", "r", (3, 4))))
    fields[4] = block_ids
    with pytest.raises(MalformedMessage):
        decode_notification(msgpack.packb(fields))


@pytest.mark.parametrize("num_blocks", [-1, 1.0, True, "1", None])
def test_a_note_counts_blocks(num_blocks: object) -> None:
    fields = _fields(encode(NOTE))
    fields[6] = num_blocks
    with pytest.raises(MalformedMessage):
        decode_notification(msgpack.packb(fields))


def test_a_part_says_which_it_is() -> None:
    """Neither field may be left out: what is no part would be taken for a whole prompt."""
    fields = _fields(encode(HANDOFF))
    for num_fields in (-2, -3):
        with pytest.raises(MalformedMessage):
            decode_notification(msgpack.packb(fields[:num_fields]))


def test_a_whole_number_of_seconds_is_taken() -> None:
    fields = _fields(encode(HANDOFF))
    fields[9] = 5
    handoff = decode_notification(msgpack.packb(fields))
    assert repr(handoff).replace("CheckedToken(", "Token(") == repr(HANDOFF)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (3, -1),
        (4, None),
        (4, {"num_running": 1}),
        (4, {**asdict(FRAME.load), "free_blocks": -1}),
        (4, {**asdict(FRAME.load), "step_s": float("nan")}),
        (4, {**asdict(FRAME.load), "step_s": -0.1}),
        (5, [7]),
        (5, ["x" * 5000]),
        (6, [["r", 0, 1, 2]]),
        (6, [["r", 0, 1, 2, None, None, None]]),
        (6, [["r", 0, -1, 2, None, None]]),
        (6, [["r", 0, 1, 2**63, None, None]]),
        (6, [["r", 0, True, 2, None, None]]),
        (6, [["x" * 5000, 0, 1, 2, None, None]]),
        (6, [["r", 0, 1, 2, "exploded", None]]),
        (6, [["r", 0, 1, 2, None, {"logprob": "-1"}]]),
        (6, [["r", 0, 1, 2, None, {"logprob": float("nan")}]]),
        (6, [["r", 0, 1, 2, None, {"logprob": -1.0, "top": [[3, float("-inf")]]}]]),
        (6, [["r", 0, 1, 2, None, {"logprob": -1.0, "top": [[-3, -1.0]]}]]),
        (6, [["r", 0, 1, 2, None, {"logprob": -1.0, "top": [[3, -1.0, 0]]}]]),
        (7, [{"request_id": "r", "start": -1, "positions": []}]),
        (7, [{"request_id": "r", "start": 0, "positions": [{"logprob": float("inf")}]}]),
        (7, [{"request_id": "r", "start": 0}]),
        (8, [["r"]]),
        (8, [["r", -1]]),
        (8, [["r", 1.5]]),
        (8, [["r", True]]),
        (8, [["r", 1, 1]]),
        (8, [["x" * 5000, 1]]),
    ],
)
def test_every_field_of_a_frame_is_checked(index: int, value: object) -> None:
    fields = _fields(encode(FRAME))
    assert decode_frame(msgpack.packb(fields)) == FRAME
    fields[index] = value
    with pytest.raises(MalformedMessage):
        decode_frame(msgpack.packb(fields))


@pytest.mark.parametrize(
    "reply",
    [
        PrefillReply(CallStatus.OK, "", (), 0.0, 0.0, FRAME.load, (), 48),
        GenerateReply(CallStatus.OK, "", ((0, 3),), 0.0, 0.0, 0.0, 0.0, 48),
    ],
)
def test_how_much_a_reply_found_is_a_count(reply: PrefillReply | GenerateReply) -> None:
    decode: Decoder[PrefillReply | GenerateReply] = Decoder(type(reply))
    fields = msgpack.unpackb(encode(reply))
    assert decode(msgpack.packb(fields)) == reply
    for wrong in (-1, 1.5, True, "48", None):
        with pytest.raises(MalformedMessage, match="num_cached"):
            decode(msgpack.packb(fields | {"num_cached": wrong}))
    del fields["num_cached"]  # of a replica before an update
    assert decode(msgpack.packb(fields)).num_cached == 0


def test_scores_in_replies_are_checked_likewise() -> None:
    good = TokenLogprobs(-0.5, ((7, -0.5), (8, -9999.0)))
    assert decode_scores(encode((None, good))) == (None, good)
    for bad in (TokenLogprobs(float("nan")), TokenLogprobs(-1.0, ((-1, -1.0),)), -1.0):
        with pytest.raises(MalformedMessage):
            decode_scores(encode((good, bad)))


def test_unknown_kind_extra_field_and_map_are_refused() -> None:
    fields = _fields(encode(NOTE))
    for bad in (
        [fields[0], "explode", *fields[2:]],
        [*fields, ""],
        fields[:-1],
        {0: fields},
        msgpack.ExtType(1, b""),
    ):
        with pytest.raises(MalformedMessage):
            decode_notification(msgpack.packb(bad))


def test_a_frame_is_no_notification_and_back() -> None:
    with pytest.raises(MalformedMessage):
        decode_notification(encode(FRAME))
    with pytest.raises(MalformedMessage):
        decode_frame(encode(NOTE))


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.exit, ("a pickle was loaded",)


def test_pickles_are_not_loaded() -> None:
    for payload in (pickle.dumps(NOTE), pickle.dumps(_Bomb())):
        for decode in (decode_frame, decode_notification):
            with pytest.raises(MalformedMessage):
                decode(payload)


def test_size_is_bounded_before_parsing() -> None:
    with pytest.raises(MalformedMessage, match="bytes are more"):
        decode_notification(b"\xc0" * (9 << 20))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode_notification(b"\x91" * 100_000)
