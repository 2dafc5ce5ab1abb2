"""Handoffs in parts, both halves: event in, actions out. Time is a number."""

from __future__ import annotations

import pytest
from msgspec import structs

from replicas.kv.handoff_actions import (
    Action,
    BlocksDisputed,
    CheckDigests,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    KvReady,
    LastPartArrived,
    LossReason,
    ReadReleased,
    SendNote,
    SourceOutcome,
    SourceReleased,
    StartRead,
)
from replicas.kv.handoff_reader import HandoffReader
from replicas.kv.handoff_source import HandoffSource
from replicas.messages import Dispute, Handoff, NoteKind, Token, TransferNote, TransferPeer

TIMING = HandoffTiming(lease_s=9.0, resend_s=0.125, max_resend_s=0.5, remember_s=60.0, quarantine_s=5.0)
SOURCE, READER = "prefill-s1", "decode-r1"
PEER = TransferPeer("prefill", "s1", SOURCE, b"", "f", num_blocks=20, block_bytes=64)
IDS, HERE = (14, 5, 6, 17, 8), (1, 2, 3, 4, 5)  # of a prompt of 5 blocks, at the source and at the reader
DIGESTS = tuple(f"digest-{place}".encode() for place in range(5))
FIRST_TOKENS = (Token("t", 0, 0, 42, None),)


def part(first: int, end: int) -> Handoff:
    is_last = end == len(IDS)
    tokens = FIRST_TOKENS if is_last else ()
    digests = b"".join(DIGESTS[first:end])
    return Handoff("t", "s1", "r1", "f", IDS[first:end], 70, digests, tokens, 9.0, (), first, is_last)


def note(kind: NoteKind, num_blocks: int = 0, reason: str = "") -> TransferNote:
    return TransferNote(kind, "t", "s1", "r1", reason, num_blocks)


def renew(num_blocks: int) -> SendNote:
    return SendNote(SOURCE, note(NoteKind.RENEW, num_blocks))


def read(first: int, end: int) -> StartRead:
    carried = note(NoteKind.DONE) if end == len(IDS) else note(NoteKind.RENEW, end)
    return StartRead("t", PEER, HERE[first:end], IDS[first:end], carried)


def check(first: int, end: int) -> CheckDigests:
    return CheckDigests("t", first, HERE[first:end], b"".join(DIGESTS[first:end]))


def lost(actions: list[Action]) -> list[LossReason]:
    return [action.reason for action in actions if isinstance(action, KvLost)]


# -- the reader ------------------------------------------------------------------------------------


def waiting() -> HandoffReader:
    reader = HandoffReader("r1", "f", TIMING, require_digests=True)
    assert reader.expect("t", PEER, 70, 5, 100.0, 0.0) == []
    return reader


def begun(num_kept: int = 0) -> HandoffReader:
    """Of the first two blocks it was told, and it has memory."""
    reader = waiting()
    assert reader.receive_handoff(part(0, 2), SOURCE, 1.0) == [renew(2), HandoffArrived("t", part(0, 2))]
    reader.read_into("t", HERE, num_kept, 1.0)
    return reader


def between() -> HandoffReader:
    """It has read two blocks."""
    reader = begun()
    assert reader.read_ended("t", True, "", 1.5) == [check(0, 2)]
    assert reader.digests_checked(check(0, 2), (), 1.5) == []
    return reader


def test_each_part_is_read_when_it_comes_and_only_the_last_read_says_done() -> None:
    reader = waiting()
    assert reader.receive_handoff(part(0, 2), SOURCE, 1.0) == [renew(2), HandoffArrived("t", part(0, 2))]
    assert reader.read_into("t", HERE, 0, 1.1) == [read(0, 2)]
    assert reader.read_ended("t", True, "", 1.2) == [check(0, 2)]
    assert reader.digests_checked(check(0, 2), (), 1.3) == []
    assert reader.receive_handoff(part(2, 3), SOURCE, 2.0) == [renew(3), read(2, 3)]
    assert reader.read_ended("t", True, "", 2.1) == [check(2, 3)]
    assert reader.receive_handoff(part(3, 5), SOURCE, 3.0) == [renew(5), LastPartArrived("t", part(3, 5)), read(3, 5)]
    assert reader.digests_checked(check(2, 3), (), 3.1) == []
    assert reader.read_ended("t", True, "", 3.2) == [ReadReleased("t"), check(3, 5)]
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 3.3) == []
    assert reader.digests_checked(check(3, 5), (), 3.4) == [KvReady("t")]


def test_parts_that_come_while_one_is_read_are_read_together() -> None:
    reader = begun()
    assert reader.receive_handoff(part(2, 3), SOURCE, 1.1) == [renew(3)]
    assert reader.receive_handoff(part(3, 5), SOURCE, 1.2) == [renew(5), LastPartArrived("t", part(3, 5))]
    assert reader.read_ended("t", True, "", 1.3) == [read(2, 5), check(0, 2)]


def test_parts_that_come_before_there_is_memory_are_read_together() -> None:
    reader = waiting()
    reader.receive_handoff(part(0, 2), SOURCE, 1.0)
    assert reader.receive_handoff(part(2, 5), SOURCE, 1.2) == [renew(5), LastPartArrived("t", part(2, 5))]
    assert reader.read_into("t", HERE, 0, 1.3) == [read(0, 5)]


def test_a_part_whose_predecessor_is_missing_waits_to_be_sent_again() -> None:
    reader = waiting()
    assert reader.receive_handoff(part(2, 3), SOURCE, 1.0) == [renew(0)]
    reader.receive_handoff(part(0, 1), SOURCE, 1.1)
    assert reader.receive_handoff(part(3, 5), SOURCE, 1.2) == [renew(1)]
    assert reader.receive_handoff(part(2, 3), SOURCE, 1.2) == [renew(1)]
    assert reader.read_into("t", HERE, 0, 1.3) == [read(0, 1)]
    # As a source sends it again: all in one, some of which is known already.
    assert reader.receive_handoff(part(0, 5), SOURCE, 1.4) == [renew(5), LastPartArrived("t", part(0, 5))]
    assert reader.read_ended("t", True, "", 1.5) == [read(1, 5), check(0, 1)]


def test_a_second_copy_of_a_part_is_answered_and_read_once() -> None:
    reader = between()
    assert reader.receive_handoff(part(0, 2), SOURCE, 1.6) == [renew(2)]
    assert reader.receive_handoff(part(0, 1), SOURCE, 1.6) == [renew(2)]
    reader.receive_handoff(part(2, 5), SOURCE, 2.0)
    assert reader.receive_handoff(part(0, 2), SOURCE, 2.1) == [renew(5)]
    reader.read_ended("t", True, "", 2.2)
    for copy in (part(0, 2), part(2, 5)):
        assert reader.receive_handoff(copy, SOURCE, 2.3) == [SendNote(SOURCE, note(NoteKind.DONE))]


@pytest.mark.parametrize("num_kept", range(6))
def test_what_is_kept_is_not_read_whichever_part_it_is_in(num_kept: int) -> None:
    reader = waiting()
    reader.receive_handoff(part(0, 2), SOURCE, 1.0)
    ordered = [action for action in reader.read_into("t", HERE, num_kept, 1.0) if isinstance(action, StartRead)]
    assert ordered == ([read(num_kept, 2)] if num_kept < 2 else [])
    if ordered:
        reader.read_ended("t", True, "", 1.0)
        reader.digests_checked(check(num_kept, 2), (), 1.0)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.5) == [], "nothing can have been confirmed"
    actions = reader.receive_handoff(part(2, 5), SOURCE, 2.0)
    assert actions[:2] == [renew(5), LastPartArrived("t", part(2, 5))]
    if num_kept == 5:
        assert actions[2:] == [SendNote(SOURCE, note(NoteKind.DONE)), ReadReleased("t")]
    else:
        rest = max(2, num_kept)
        assert actions[2:] == [read(rest, 5)]
        assert reader.read_ended("t", True, "", 2.1) == [ReadReleased("t"), check(rest, 5)]
        reader.digests_checked(check(rest, 5), (), 2.2)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 2.3) == [KvReady("t")]


def test_all_is_kept_but_without_first_tokens_there_is_nothing_to_run() -> None:
    reader = begun(num_kept=5)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.1) == []
    assert lost(reader.tick(100.0)) == [LossReason.DEADLINE]


def test_the_lease_is_renewed_between_parts() -> None:
    reader = between()
    assert [second for second in range(2, 20) if reader.tick(float(second)) == [renew(2)]] == [4, 7, 10, 13, 16, 19]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda reader: reader.cancel("t", 2.0), LossReason.CANCELLED),
        (lambda reader: reader.receive(note(NoteKind.REFUSE), SOURCE, 2.0), LossReason.REFUSED),
        (lambda reader: reader.receive(note(NoteKind.DROP), SOURCE, 2.0), LossReason.DROPPED),
        (lambda reader: reader.peer_dead(SOURCE, 2.0), LossReason.PEER_DEAD),
        (lambda reader: reader.tick(100.0), LossReason.DEADLINE),
    ],
)
def test_what_ends_between_parts_lets_go_of_its_blocks_at_once(end: object, reason: LossReason) -> None:
    reader = between()
    actions = end(reader)  # type: ignore[operator]
    assert lost(actions) == [reason]
    assert actions[-1] == ReadReleased("t")
    assert reader.num_quarantined(1000.0) == reader.num_open == 0
    (answer,) = reader.receive_handoff(part(2, 5), SOURCE, 100.0)  # one that was on its way
    assert answer == SendNote(SOURCE, note(NoteKind.DROP, reason="unknown"))


def test_what_ends_while_a_part_is_read_waits_for_the_read() -> None:
    reader = begun()
    actions = reader.cancel("t", 2.0)
    assert lost(actions) == [LossReason.CANCELLED]
    assert ReadReleased("t") not in actions
    assert reader.num_quarantined(7.0) == 1
    assert reader.read_ended("t", True, "", 8.0) == [ReadReleased("t")]


def test_a_read_that_fails_ends_all_of_it() -> None:
    actions = begun().read_ended("t", False, "boom", 2.0)
    assert actions[0] == ReadReleased("t")
    assert actions[-1] == KvLost("t", LossReason.READ_FAILED, "boom")


@pytest.mark.parametrize("is_next_open", [True, False], ids=["beside the next read", "between parts"])
def test_a_wrong_block_of_an_earlier_part_is_disputed_by_name(is_next_open: bool) -> None:
    reader = begun()
    reader.read_ended("t", True, "", 1.5)
    if is_next_open:
        assert reader.receive_handoff(part(2, 5), SOURCE, 1.6)[-1] == read(2, 5)
    actions = reader.digests_checked(check(0, 2), (1,), 1.7)
    assert actions[0] == SendNote(SOURCE, Dispute("t", "s1", "r1", (IDS[1],)))
    detail = "block 1 of the prompt (5 of prefill, read into 2); wrong in all: 1 of 2 read"
    assert KvLost("t", LossReason.DIGEST_MISMATCH, detail) in actions
    assert (ReadReleased("t") in actions) == (not is_next_open)
    assert reader.digests_checked(check(2, 5), (), 1.8) == []
    if is_next_open:
        assert reader.read_ended("t", True, "", 1.9) == [ReadReleased("t")]


def test_it_is_not_ready_before_every_part_is_checked() -> None:
    """The checks of parts may end in any order."""
    reader = begun()
    reader.receive_handoff(part(2, 5), SOURCE, 1.1)
    reader.read_ended("t", True, "", 1.2)
    reader.read_ended("t", True, "", 1.3)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.4) == []
    assert reader.digests_checked(check(2, 5), (), 1.5) == []
    assert reader.digests_checked(check(0, 2), (), 1.6) == [KvReady("t")]


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (structs.replace(part(2, 5), is_last=False), "blocks 2 to 5 and more to come, of 5"),
        (structs.replace(part(2, 4), is_last=True), "blocks 2 to 4, of 5"),
        (structs.replace(part(2, 5), first_block=3), "blocks 3 to 6, of 5"),
        (structs.replace(part(2, 3), block_ids=()), "blocks 2 to 2 and more to come, of 5"),
        (structs.replace(part(0, 5), block_ids=(14, 6, 5, 17, 8)), "block 0 and those behind it told of twice"),
        (structs.replace(part(1, 5), digests=b"x" * 32), "digests from block 1 on that have changed"),
        (structs.replace(part(2, 5), digests=None), "no digests"),
        (structs.replace(part(2, 5), digests=DIGESTS[0]), "8 bytes of digests for 3 blocks"),
        (structs.replace(part(2, 5), block_ids=(6, 17, 20)), "a block id outside"),
        (structs.replace(part(2, 5), prompt_len=71), "71 prompt tokens"),
        (structs.replace(part(2, 5), fingerprint="g"), "fingerprint g"),
    ],
)
def test_a_part_that_does_not_fit_the_others_is_lost(wrong: Handoff, detail: str) -> None:
    actions = between().receive_handoff(wrong, SOURCE, 2.0)
    (loss,) = (action for action in actions if isinstance(action, KvLost))
    assert loss.reason is LossReason.MISMATCH
    assert loss.detail.startswith(detail)
    assert actions[-1] == ReadReleased("t")


# -- the source ------------------------------------------------------------------------------------


def offered(*parts: tuple[int, int]) -> HandoffSource:
    source = HandoffSource("s1", TIMING)
    for first, end in parts:
        assert source.offer(part(first, end), READER, 1000.0, 0.0) == [SendNote(READER, part(first, end))]
    assert source.num_open == 1
    return source


def outcomes(actions: list[Action]) -> list[SourceOutcome]:
    return [action.outcome for action in actions if isinstance(action, SourceReleased)]


def test_parts_are_one_lease_and_one_release() -> None:
    source = offered((0, 2), (2, 3), (3, 5))
    actions = source.receive(note(NoteKind.DONE), READER, 1.0)
    assert actions == [
        SendNote(READER, note(NoteKind.CONFIRM, reason="confirmed")),
        SourceReleased("t", SourceOutcome.CONFIRMED),
    ]
    assert source.num_open == 0


def test_what_was_not_offered_cannot_be_done() -> None:
    source = offered((0, 2))
    assert source.receive(note(NoteKind.DONE), READER, 1.0) == []
    assert source.num_open == 1
    source.offer(part(2, 5), READER, 1000.0, 2.0)
    assert outcomes(source.receive(note(NoteKind.DONE), READER, 3.0)) == [SourceOutcome.CONFIRMED]


def test_what_was_not_heard_is_sent_again_in_one() -> None:
    source = offered((0, 2), (2, 3))
    assert source.tick(0.125) == [SendNote(READER, part(0, 3))]
    source.receive(note(NoteKind.RENEW, 2), READER, 0.2)
    assert source.tick(0.4) == [SendNote(READER, part(2, 3))]
    source.offer(part(3, 5), READER, 1000.0, 0.5)
    assert source.tick(1.0) == [SendNote(READER, part(2, 5))]
    source.receive(note(NoteKind.RENEW, 1), READER, 1.1)  # overtaken by a later one
    assert source.tick(1.6) == [SendNote(READER, part(2, 5))]
    source.receive(note(NoteKind.RENEW, 5), READER, 1.7)
    assert [source.tick(1.8 + step / 10) for step in range(80)] == [[]] * 80


def test_a_part_behind_others_that_were_heard_is_sent_again_soon() -> None:
    source = offered((0, 2))
    source.receive(note(NoteKind.RENEW, 2), READER, 0.1)
    assert source.tick(5.0) == []
    source.offer(part(2, 5), READER, 1000.0, 5.0)
    assert source.tick(5.1) == []
    assert source.tick(5.125) == [SendNote(READER, part(2, 5))]


def test_a_reader_that_has_heard_of_more_than_there_is_has_heard_of_all() -> None:
    source = offered((0, 2))
    source.receive(note(NoteKind.RENEW, 99), READER, 0.1)
    source.offer(part(2, 5), READER, 1000.0, 1.0)
    assert source.tick(1.125) == [SendNote(READER, part(2, 5))]


def test_the_lease_runs_from_the_first_part_and_a_part_does_not_prolong_it() -> None:
    source = offered((0, 2))
    source.offer(part(2, 3), READER, 5000.0, 8.9)
    assert outcomes(source.tick(9.0)) == [SourceOutcome.EXPIRED]


def test_a_part_of_an_expired_lease_ends_it() -> None:
    source = offered((0, 2))
    assert outcomes(source.offer(part(2, 5), READER, 1000.0, 9.0)) == [SourceOutcome.EXPIRED]
    assert source.num_open == 0


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda source: source.receive(note(NoteKind.DROP), READER, 1.0), SourceOutcome.DROPPED),
        (lambda source: source.tick(9.0), SourceOutcome.EXPIRED),
        (lambda source: source.cancel("t", 1.0), SourceOutcome.CANCELLED),
        (lambda source: source.peer_dead(READER, 1.0), SourceOutcome.PEER_DEAD),
    ],
)
def test_a_part_of_a_transfer_that_has_ended_is_ignored(end: object, outcome: SourceOutcome) -> None:
    source = offered((0, 2))
    assert outcomes(end(source)) == [outcome]  # type: ignore[operator]
    assert source.offer(part(2, 5), READER, 1000.0, 10.0) == []
    assert source.num_open == 0


def test_a_drop_before_the_first_part_ends_them_all() -> None:
    source = HandoffSource("s1", TIMING)
    source.receive(note(NoteKind.DROP), READER, 0.0)
    assert source.offer(part(0, 2), READER, 1000.0, 1.0) == [SourceReleased("t", SourceOutcome.DROPPED)]
    assert source.offer(part(2, 5), READER, 1000.0, 2.0) == []


def test_a_reader_that_cannot_be_reached_ends_them_all() -> None:
    source = HandoffSource("s1", TIMING)
    assert source.unreachable(part(0, 2), 1.0) == [SourceReleased("t", SourceOutcome.PEER_UNREACHABLE)]
    assert source.offer(part(2, 5), READER, 1000.0, 2.0) == []


@pytest.mark.parametrize(
    "wrong",
    [
        part(3, 5),  # a gap
        part(1, 5),  # an overlap
        part(0, 5),  # once more from the front
        structs.replace(part(2, 3), block_ids=()),
        structs.replace(part(2, 5), reader_epoch="r2"),
        structs.replace(part(2, 5), source_epoch="s2"),
    ],
)
def test_a_part_that_does_not_follow_is_refused_and_changes_nothing(wrong: Handoff) -> None:
    source = offered((0, 2))
    with pytest.raises(ValueError):
        source.offer(wrong, READER, 1000.0, 0.1)
    assert source.tick(0.125) == [SendNote(READER, part(0, 2))]


def test_nothing_follows_the_last_part_nor_comes_without_a_first_one() -> None:
    source = offered((0, 2), (2, 5))
    with pytest.raises(ValueError):
        source.offer(structs.replace(part(2, 3), first_block=5), READER, 1000.0, 0.1)
    with pytest.raises(ValueError):
        HandoffSource("s1", TIMING).offer(part(2, 5), READER, 1000.0, 0.1)
    with pytest.raises(ValueError):
        offered((0, 2)).offer(part(2, 5), "stranger", 1000.0, 0.1)


def test_a_block_of_an_earlier_part_may_be_disputed_at_any_time() -> None:
    source, dispute = offered((0, 2), (2, 3)), Dispute("t", "s1", "r1", (14,))
    assert source.receive_dispute(dispute) == [BlocksDisputed("t", (14,))]
    assert outcomes(source.receive(note(NoteKind.DROP), READER, 1.0)) == [SourceOutcome.DROPPED]
    assert source.receive_dispute(dispute) == [BlocksDisputed("t", (14,))]
