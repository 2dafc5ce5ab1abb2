"""The reader's half: event in, actions out. Time is a number."""

from __future__ import annotations

import pytest
from msgspec import structs

from replicas.kv.handoff_actions import (
    Action,
    CheckDigests,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    KvReady,
    LossReason,
    ReadReleased,
    SendNote,
    StartRead,
)
from replicas.kv.handoff_reader import HandoffReader
from replicas.messages import Dispute, Handoff, NoteKind, TransferNote, TransferPeer

TIMING = HandoffTiming(lease_s=9.0, resend_s=0.125, max_resend_s=0.5, remember_s=60.0, quarantine_s=5.0)
SOURCE = "prefill-s1"
PEER = TransferPeer("prefill", "s1", SOURCE, b"", "f", num_blocks=10, block_bytes=64)
DIGESTS = b"first...second.."
HANDOFF = Handoff("t", "s1", "r1", "f", (4, 5), 30, DIGESTS, (), 9.0, (), 0, True)
RENEW = SendNote(SOURCE, TransferNote(NoteKind.RENEW, "t", "s1", "r1", "", 2))
DONE = SendNote(SOURCE, TransferNote(NoteKind.DONE, "t", "s1", "r1", "", 0))

CHECK = CheckDigests("t", 0, (1, 2), DIGESTS)


def note(kind: NoteKind, source_epoch: str = "s1", reader_epoch: str = "r1") -> TransferNote:
    return TransferNote(kind, "t", source_epoch, reader_epoch, "", 0)


def waiting(require_digests: bool = True, deadline_s: float = 100.0) -> HandoffReader:
    reader = HandoffReader("r1", "f", TIMING, require_digests)
    assert reader.expect("t", PEER, 30, 2, deadline_s, 0.0) == []
    return reader


def offered(require_digests: bool = True, deadline_s: float = 100.0) -> HandoffReader:
    reader = waiting(require_digests, deadline_s)
    assert reader.receive_handoff(HANDOFF, SOURCE, 0.0) == [RENEW, HandoffArrived("t", HANDOFF)]
    return reader


def reading(require_digests: bool = True, deadline_s: float = 100.0) -> HandoffReader:
    reader = offered(require_digests, deadline_s)
    assert reader.read_into("t", (1, 2), 0, 0.0) == [StartRead("t", PEER, (1, 2), (4, 5), note(NoteKind.DONE))]
    return reader


def confirming(deadline_s: float = 100.0) -> HandoffReader:
    reader = reading(deadline_s=deadline_s)
    assert reader.read_ended("t", True, "", 1.0) == [ReadReleased("t"), CHECK]
    return reader


def lost(actions: list[Action]) -> list[LossReason]:
    return [a.reason for a in actions if isinstance(a, KvLost)]


def sent(actions: list[Action]) -> list[NoteKind]:
    return [a.message.kind for a in actions if isinstance(a, SendNote) and isinstance(a.message, TransferNote)]


def test_confirm_and_digest_in_either_order_make_it_ready() -> None:
    reader = confirming()
    assert reader.digests_checked(CHECK, (), 1.0) == []
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.1) == [KvReady("t")]
    reader = confirming()
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.0) == []
    assert reader.digests_checked(CHECK, (), 1.1) == [KvReady("t")]
    assert reader.num_open == 0


def test_confirm_may_overtake_our_own_poll_of_the_read() -> None:
    reader = reading(require_digests=False)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 0.5) == []
    assert reader.read_ended("t", True, "", 0.6) == [ReadReleased("t"), KvReady("t")]


def test_confirm_before_the_read_means_nothing() -> None:
    reader = offered(require_digests=False)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 0.1) == []
    reader.read_into("t", (1, 2), 0, 0.2)
    assert reader.read_ended("t", True, "", 0.3) == [ReadReleased("t")]
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 0.4) == [KvReady("t")]


def test_digest_mismatch_is_lost_even_when_confirmed() -> None:
    reader = confirming()
    reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.0)
    actions = reader.digests_checked(CHECK, (0, 1), 1.1)
    assert lost(actions) == [LossReason.DIGEST_MISMATCH]
    assert sent(actions) == []  # the source has freed already
    assert actions[0] == SendNote(SOURCE, Dispute("t", "s1", "r1", (4, 5)))  # and must know all the same


def test_digest_mismatch_before_confirm_drops() -> None:
    actions = confirming().digests_checked(CHECK, (1,), 1.1)
    assert lost(actions) == [LossReason.DIGEST_MISMATCH]
    assert sent(actions) == [NoteKind.DROP]
    assert actions[0] == SendNote(SOURCE, Dispute("t", "s1", "r1", (5,)))


def test_done_is_resent_with_back_off_until_confirmed() -> None:
    reader = confirming()
    reader.digests_checked(CHECK, (), 1.0)
    times = [step / 64 for step in range(64, 160) if reader.tick(step / 64) == [DONE]]
    assert times == [1.125, 1.375, 1.875, 2.375]
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 2.5) == [KvReady("t")]
    assert reader.tick(3.0) == []


def test_lease_is_renewed_at_a_third_while_waiting_for_memory_and_while_reading() -> None:
    reader = offered()
    assert [step for step in range(1, 10) if reader.tick(float(step)) == [RENEW]] == [3, 6, 9]
    reader.read_into("t", (1, 2), 0, 9.5)
    assert [step for step in range(10, 19) if reader.tick(float(step)) == [RENEW]] == [12, 15, 18]


@pytest.mark.parametrize("make", [waiting, offered, reading, confirming])
def test_deadline_ends_every_phase_with_a_drop(make: object) -> None:
    reader: HandoffReader = make(deadline_s=5.0)  # type: ignore[operator]
    actions = [action for step in range(1, 12) for action in reader.tick(step / 2)]
    assert lost(actions) == [LossReason.DEADLINE]
    assert sent(actions)[-1] is NoteKind.DROP
    assert reader.num_open == 0


@pytest.mark.parametrize("make", [waiting, offered, reading, confirming])
@pytest.mark.parametrize(
    ("kind", "reason"), [(NoteKind.REFUSE, LossReason.REFUSED), (NoteKind.DROP, LossReason.DROPPED)]
)
def test_the_source_can_end_every_phase(make: object, kind: NoteKind, reason: LossReason) -> None:
    reader: HandoffReader = make()  # type: ignore[operator]
    actions = reader.receive(note(kind), SOURCE, 2.0)
    assert lost(actions) == [reason]
    assert sent(actions) == []  # it knows
    assert reader.receive(note(kind), SOURCE, 2.1) == []


def test_cancel_during_a_read_is_final_but_blocks_wait_for_the_handle() -> None:
    reader = reading()
    actions = reader.cancel("t", 1.0)
    assert lost(actions) == [LossReason.CANCELLED]
    assert sent(actions) == [NoteKind.DROP]
    assert not any(isinstance(action, ReadReleased) for action in actions)
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.1) == []
    assert reader.num_quarantined(5.9) == 0
    assert reader.num_quarantined(6.0) == 1
    assert reader.read_ended("t", True, "", 50.0) == [ReadReleased("t")]
    assert reader.num_quarantined(50.0) == 0
    assert reader.cancel("t", 51.0) == []


def test_a_handle_that_never_ends_is_quarantined_for_ever() -> None:
    reader = reading(deadline_s=2.0)
    assert lost(reader.tick(2.0)) == [LossReason.DEADLINE]
    later = [action for step in range(1000) for action in reader.tick(float(step))]
    assert later == []
    assert reader.num_quarantined(1000.0) == 1
    with pytest.raises(ValueError):
        reader.read_into("t", (3, 4), 0, 1000.0)


def test_read_error_is_lost_and_releases() -> None:
    actions = reading().read_ended("t", False, "boom", 1.0)
    assert actions[0] == ReadReleased("t")
    assert actions[-1] == KvLost("t", LossReason.READ_FAILED, "boom")
    assert sent(actions) == [NoteKind.DROP]


def test_blocks_that_come_too_late_are_released_at_once() -> None:
    reader = offered()
    reader.cancel("t", 1.0)
    assert reader.read_into("t", (1, 2), 0, 1.1) == [ReadReleased("t")]


@pytest.mark.parametrize(
    "wrong",
    [
        structs.replace(HANDOFF, fingerprint="other"),
        structs.replace(HANDOFF, prompt_len=31),
        structs.replace(HANDOFF, block_ids=(4,)),
        structs.replace(HANDOFF, block_ids=(4, 10)),
        structs.replace(HANDOFF, block_ids=(-1, 4)),
        structs.replace(HANDOFF, digests=None),
        structs.replace(HANDOFF, digests=b""),
        structs.replace(HANDOFF, digests=DIGESTS[:8]),
        structs.replace(HANDOFF, digests=DIGESTS[:15]),
        structs.replace(HANDOFF, digests=DIGESTS + b"more...."),
    ],
)
def test_a_handoff_of_something_else_is_lost_and_dropped(wrong: Handoff) -> None:
    actions = waiting().receive_handoff(wrong, SOURCE, 1.0)
    assert lost(actions) == [LossReason.MISMATCH]
    assert sent(actions) == [NoteKind.DROP]


@pytest.mark.parametrize(
    ("wrong", "agent"),
    [
        (structs.replace(HANDOFF, transfer_id="other"), SOURCE),
        (structs.replace(HANDOFF, source_epoch="s0"), "prefill-s0"),
        (structs.replace(HANDOFF, reader_epoch="r0"), SOURCE),
        (HANDOFF, "stranger"),
    ],
)
def test_a_strangers_handoff_is_dropped_and_changes_nothing(wrong: Handoff, agent: str) -> None:
    reader = waiting()
    drop = TransferNote(NoteKind.DROP, wrong.transfer_id, wrong.source_epoch, wrong.reader_epoch, "unknown", 0)
    assert reader.receive_handoff(wrong, agent, 1.0) == [SendNote(agent, drop)]
    assert reader.receive_handoff(HANDOFF, SOURCE, 1.1)[-1] == HandoffArrived("t", HANDOFF)


@pytest.mark.parametrize(
    ("wrong", "agent"),
    [
        (note(NoteKind.CONFIRM, source_epoch="s0"), SOURCE),
        (note(NoteKind.CONFIRM, reader_epoch="r0"), SOURCE),
        (note(NoteKind.REFUSE, source_epoch="s0"), SOURCE),
        (note(NoteKind.CONFIRM), "stranger"),
        (note(NoteKind.DONE), SOURCE),
        (note(NoteKind.RENEW), SOURCE),
    ],
)
def test_strangers_notes_are_ignored(wrong: TransferNote, agent: str) -> None:
    reader = confirming()
    reader.digests_checked(CHECK, (), 1.0)
    assert reader.receive(wrong, agent, 1.1) == []
    assert reader.num_open == 1


def test_a_second_copy_of_the_handoff_is_answered_by_phase() -> None:
    reader = offered()
    assert reader.receive_handoff(HANDOFF, SOURCE, 0.1) == [RENEW]
    reader.read_into("t", (1, 2), 0, 0.2)
    assert reader.receive_handoff(HANDOFF, SOURCE, 0.3) == [RENEW]
    reader.read_ended("t", True, "", 0.4)
    assert reader.receive_handoff(HANDOFF, SOURCE, 0.5) == [DONE]
    reader.digests_checked(CHECK, (), 0.6)
    reader.receive(note(NoteKind.CONFIRM), SOURCE, 0.7)
    assert sent(reader.receive_handoff(HANDOFF, SOURCE, 0.8)) == [NoteKind.DROP]


def test_peer_dead_loses_what_is_not_confirmed() -> None:
    reader = confirming()
    assert reader.peer_dead("stranger", 1.0) == []
    assert reader.peer_dead(SOURCE, 1.0) == [KvLost("t", LossReason.PEER_DEAD, SOURCE)]
    reader = confirming()
    reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.0)
    assert reader.peer_dead(SOURCE, 1.1) == []
    assert reader.digests_checked(CHECK, (), 1.2) == [KvReady("t")]


def test_an_id_is_expected_once() -> None:
    reader = waiting()
    with pytest.raises(ValueError):
        reader.expect("t", PEER, 30, 2, 100.0, 0.1)
    reader.cancel("t", 0.2)
    with pytest.raises(ValueError):
        reader.expect("t", PEER, 30, 2, 100.0, 0.3)


def test_foreign_fingerprint_is_lost_before_anything_is_sent_over() -> None:
    reader = HandoffReader("r1", "f2", TIMING, False)
    assert lost(reader.expect("t", PEER, 30, 2, 100.0, 0.0)) == [LossReason.MISMATCH]


def test_read_into_wants_an_arrived_handoff_and_the_right_number() -> None:
    with pytest.raises(ValueError):
        waiting().read_into("t", (1, 2), 0, 0.1)
    reader = offered()
    with pytest.raises(ValueError):
        reader.read_into("t", (1,), 0, 0.1)
    reader.read_into("t", (1, 2), 0, 0.2)
    with pytest.raises(ValueError):
        reader.read_into("t", (1, 2), 0, 0.3)
    with pytest.raises(ValueError):
        waiting().read_ended("t", True, "", 0.0)


@pytest.mark.parametrize(("num_kept", "wrong"), [(-1, (1, 2)), (3, (1, 2)), (1, (1, 1)), (1, (1,)), (0, (1, 2, 3))])
def test_read_into_wants_a_possible_number_of_kept_blocks_and_reads_over_none(
    num_kept: int, wrong: tuple[int, ...]
) -> None:
    reader = offered()
    with pytest.raises(ValueError):
        reader.read_into("t", wrong, num_kept, 0.1)
    assert reader.read_into("t", (1, 2), 1, 0.2) == [StartRead("t", PEER, (2,), (5,), note(NoteKind.DONE))]


def test_only_what_is_not_kept_is_read_and_verified() -> None:
    reader, check = offered(), CheckDigests("t", 1, (2,), b"second..")
    assert reader.read_into("t", (1, 2), 1, 0.2) == [StartRead("t", PEER, (2,), (5,), note(NoteKind.DONE))]
    assert reader.read_ended("t", True, "", 1.0) == [ReadReleased("t"), check]
    actions = reader.digests_checked(check, (0,), 1.1)
    assert lost(actions) == [LossReason.DIGEST_MISMATCH]
    (loss,) = (action for action in actions if isinstance(action, KvLost))
    assert loss.detail == "block 1 of the prompt (5 of prefill, read into 2); wrong in all: 1 of 1 read"
    assert actions[0] == SendNote(SOURCE, Dispute("t", "s1", "r1", (5,)))


def test_the_first_wrong_block_is_named() -> None:
    (loss,) = (a for a in confirming().digests_checked(CHECK, (0, 1), 1.1) if isinstance(a, KvLost))
    assert loss.detail == "block 0 of the prompt (4 of prefill, read into 1); wrong in all: 2 of 2 read"


def all_kept(require_digests: bool = True) -> HandoffReader:
    reader = offered(require_digests)
    assert reader.read_into("t", (1, 2), 2, 1.0) == [DONE, ReadReleased("t")]
    return reader


@pytest.mark.parametrize("require_digests", [True, False])
def test_where_all_is_kept_nothing_is_read_but_the_source_must_confirm(require_digests: bool) -> None:
    reader = all_kept(require_digests)
    assert reader.num_open == 1
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.1) == [KvReady("t")]
    assert reader.num_open == 0
    with pytest.raises(ValueError):
        all_kept(require_digests).read_ended("t", True, "", 1.1)


def test_where_all_is_kept_done_is_resent_until_confirmed() -> None:
    reader = all_kept()
    times = [step / 64 for step in range(64, 160) if reader.tick(step / 64) == [DONE]]
    assert times == [1.125, 1.375, 1.875, 2.375]
    assert reader.receive_handoff(HANDOFF, SOURCE, 2.4) == [DONE]
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 2.5) == [KvReady("t")]


def test_where_all_is_kept_it_ends_as_any_other_and_leaves_no_orphan() -> None:
    for end, reason in (
        (lambda reader: reader.cancel("t", 2.0), LossReason.CANCELLED),
        (lambda reader: reader.receive(note(NoteKind.REFUSE), SOURCE, 2.0), LossReason.REFUSED),
        (lambda reader: reader.receive(note(NoteKind.DROP), SOURCE, 2.0), LossReason.DROPPED),
        (lambda reader: reader.peer_dead(SOURCE, 2.0), LossReason.PEER_DEAD),
        (lambda reader: reader.tick(100.0), LossReason.DEADLINE),
    ):
        reader = all_kept()
        assert lost(end(reader)) == [reason]
        assert reader.num_quarantined(1000.0) == 0
        assert reader.read_into("t", (1, 2), 2, 2.1) == [ReadReleased("t")]


def test_cancelled_while_the_rest_is_read_its_blocks_wait_for_the_handle() -> None:
    reader = offered()
    reader.read_into("t", (1, 2), 1, 0.2)
    assert lost(reader.cancel("t", 1.0)) == [LossReason.CANCELLED]
    assert reader.num_quarantined(6.0) == 1
    assert reader.read_ended("t", True, "", 50.0) == [ReadReleased("t")]


def test_verification_off_ignores_digests() -> None:
    reader = reading(require_digests=False)
    assert reader.read_ended("t", True, "", 1.0) == [ReadReleased("t")]
    assert reader.receive(note(NoteKind.CONFIRM), SOURCE, 1.1) == [KvReady("t")]
