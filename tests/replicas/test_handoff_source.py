"""The source's half: event in, actions out. Time is a number."""

from __future__ import annotations

import pytest

from replicas.kv.handoff_actions import Action, BlocksDisputed, HandoffTiming, SendNote, SourceOutcome, SourceReleased
from replicas.kv.handoff_source import HandoffSource
from replicas.messages import Dispute, Handoff, NoteKind, TransferNote

TIMING = HandoffTiming(lease_s=9.0, resend_s=0.125, max_resend_s=0.5, remember_s=60.0)
READER = "decode-r1"
HANDOFF = Handoff("t", "s1", "r1", "f", (4, 5), 30, None, (), 9.0, (), 0, True)


def note(
    kind: NoteKind, transfer_id: str = "t", source_epoch: str = "s1", reader_epoch: str = "r1", num_blocks: int = 2
) -> TransferNote:
    return TransferNote(kind, transfer_id, source_epoch, reader_epoch, "", num_blocks)


def opened(deadline_s: float = 1000.0) -> HandoffSource:
    source = HandoffSource("s1", TIMING)
    assert source.offer(HANDOFF, READER, deadline_s, 0.0) == [SendNote(READER, HANDOFF)]
    assert source.num_open == 1
    return source


def answers(actions: list[Action]) -> list[NoteKind]:
    """Kinds of the notes among the actions."""
    return [a.message.kind for a in actions if isinstance(a, SendNote) and isinstance(a.message, TransferNote)]


def released(actions: list[Action]) -> list[SourceOutcome]:
    return [a.outcome for a in actions if isinstance(a, SourceReleased)]


def test_done_while_the_lease_lives_is_confirmed_once_and_answered_again() -> None:
    source = opened()
    actions = source.receive(note(NoteKind.DONE), READER, 8.9)
    assert answers(actions) == [NoteKind.CONFIRM]
    assert released(actions) == [SourceOutcome.CONFIRMED]
    again = source.receive(note(NoteKind.DONE), READER, 9.5)
    assert answers(again) == [NoteKind.CONFIRM]
    assert released(again) == []
    assert source.num_open == 0


def test_handoff_is_resent_with_back_off_until_renewed() -> None:
    source = opened()
    sent = [step / 64 for step in range(128) if source.tick(step / 64) == [SendNote(READER, HANDOFF)]]
    assert sent == [0.125, 0.375, 0.875, 1.375, 1.875]
    assert source.receive(note(NoteKind.RENEW), READER, 2.0) == []
    assert [source.tick(2.0 + step / 10) for step in range(80)] == [[]] * 80


def test_lease_expires_and_done_is_refused() -> None:
    source = opened()
    source.receive(note(NoteKind.RENEW), READER, 0.0)
    assert source.tick(8.99) == []
    expired = source.tick(9.0)
    assert released(expired) == [SourceOutcome.EXPIRED]
    assert answers(expired) == [NoteKind.REFUSE]
    late = source.receive(note(NoteKind.DONE), READER, 9.1)
    assert answers(late) == [NoteKind.REFUSE]
    assert released(late) == []


def test_done_after_expiry_is_refused_even_when_nobody_ticked() -> None:
    source = opened()
    actions = source.receive(note(NoteKind.DONE), READER, 9.0)
    assert released(actions) == [SourceOutcome.EXPIRED]
    assert NoteKind.CONFIRM not in answers(actions)
    assert NoteKind.REFUSE in answers(actions)


def test_renewal_extends_the_lease_but_not_past_the_deadline() -> None:
    source = opened(deadline_s=20.0)
    source.receive(note(NoteKind.RENEW), READER, 8.0)
    assert source.tick(16.9) == []
    source.receive(note(NoteKind.RENEW), READER, 16.9)
    assert source.tick(19.9) == []
    assert released(source.tick(20.0)) == [SourceOutcome.EXPIRED]


def test_renewal_of_an_expired_lease_does_not_revive_it() -> None:
    source = opened()
    actions = source.receive(note(NoteKind.RENEW), READER, 9.0)
    assert released(actions) == [SourceOutcome.EXPIRED]
    assert source.num_open == 0


def test_drop_frees_at_once_and_a_later_done_is_refused() -> None:
    source = opened()
    actions = source.receive(note(NoteKind.DROP), READER, 1.0)
    assert released(actions) == [SourceOutcome.DROPPED]
    assert answers(actions) == []
    assert answers(source.receive(note(NoteKind.DONE), READER, 1.1)) == [NoteKind.REFUSE]
    assert source.receive(note(NoteKind.DROP), READER, 1.2) == []


def test_drop_before_its_handoff_is_remembered() -> None:
    source = HandoffSource("s1", TIMING)
    assert source.receive(note(NoteKind.DROP), READER, 0.0) == []
    assert source.offer(HANDOFF, READER, 1000.0, 30.0) == [SourceReleased("t", SourceOutcome.DROPPED)]
    assert source.num_open == 0


def test_drop_of_another_reader_epoch_does_not_touch_the_offer() -> None:
    source = HandoffSource("s1", TIMING)
    source.receive(note(NoteKind.DROP, reader_epoch="r0"), "decode-r0", 0.0)
    assert source.offer(HANDOFF, READER, 1000.0, 1.0) == [SendNote(READER, HANDOFF)]


@pytest.mark.parametrize(
    ("wrong", "agent"),
    [
        (note(NoteKind.DONE, source_epoch="s0"), READER),
        (note(NoteKind.DONE, reader_epoch="r0"), READER),
        (note(NoteKind.DONE, transfer_id="other"), READER),
        (note(NoteKind.DONE), "stranger"),
        (note(NoteKind.RENEW, source_epoch="s0"), READER),
    ],
)
def test_wrong_names_are_refused_with_their_own_epochs_and_change_nothing(wrong: TransferNote, agent: str) -> None:
    source = opened()
    (answer,) = source.receive(wrong, agent, 1.0)
    assert isinstance(answer, SendNote)
    assert answer.agent_name == agent
    assert isinstance(answer.message, TransferNote)
    assert answer.message.kind is NoteKind.REFUSE
    assert (answer.message.source_epoch, answer.message.reader_epoch) == (wrong.source_epoch, wrong.reader_epoch)
    assert source.num_open == 1
    assert answers(source.receive(note(NoteKind.DONE), READER, 2.0)) == [NoteKind.CONFIRM]


@pytest.mark.parametrize(
    ("wrong", "agent"),
    [
        (note(NoteKind.DROP, source_epoch="s0"), READER),
        (note(NoteKind.DROP, reader_epoch="r0"), READER),
        (note(NoteKind.DROP), "stranger"),
        (note(NoteKind.CONFIRM), READER),
        (note(NoteKind.REFUSE), READER),
    ],
)
def test_wrong_drops_and_a_sources_kinds_are_ignored(wrong: TransferNote, agent: str) -> None:
    source = opened()
    assert source.receive(wrong, agent, 1.0) == []
    assert source.num_open == 1


def test_peer_dead_frees_only_its_leases_and_fences_it() -> None:
    source = opened()
    other = Handoff("t2", "s1", "r2", "f", (7,), 3, None, (), 9.0, (), 0, True)
    source.offer(other, "decode-r2", 1000.0, 0.0)
    assert source.peer_dead(READER, 1.0) == [SourceReleased("t", SourceOutcome.PEER_DEAD)]
    assert source.num_open == 1
    assert answers(source.receive(note(NoteKind.DONE), READER, 1.5)) == [NoteKind.REFUSE]


def test_cancel_tells_the_reader() -> None:
    source = opened()
    actions = source.cancel("t", 1.0)
    assert answers(actions) == [NoteKind.DROP]
    assert released(actions) == [SourceOutcome.CANCELLED]
    assert source.cancel("t", 1.0) == []
    assert source.cancel_all(1.0) == []


def test_an_id_is_offered_once() -> None:
    source = opened()
    with pytest.raises(ValueError):
        source.offer(HANDOFF, READER, 1000.0, 0.5)
    source.receive(note(NoteKind.DONE), READER, 1.0)
    with pytest.raises(ValueError):
        source.offer(HANDOFF, READER, 1000.0, 2.0)


def test_a_foreign_epoch_is_not_offered() -> None:
    with pytest.raises(ValueError):
        HandoffSource("s2", TIMING).offer(HANDOFF, READER, 1000.0, 0.0)


def test_outcomes_are_remembered_past_the_longest_lease_then_forgotten() -> None:
    source = HandoffSource("s1", HandoffTiming(remember_s=1.0))
    source.offer(HANDOFF, READER, 1000.0, 0.0)
    source.receive(note(NoteKind.DONE), READER, 1.0)
    source.tick(18.9)
    assert answers(source.receive(note(NoteKind.DONE), READER, 18.9)) == [NoteKind.CONFIRM]
    source.tick(19.1)
    assert answers(source.receive(note(NoteKind.DONE), READER, 19.1)) == [NoteKind.REFUSE]


def test_an_unanswered_offer_ends_with_its_lease() -> None:
    source = opened()
    outcomes = [outcome for step in range(100) for outcome in released(source.tick(step / 10))]
    assert outcomes == [SourceOutcome.EXPIRED]


def test_blocks_are_disputed_while_the_lease_lives_and_after_it_and_nothing_else_changes() -> None:
    source, dispute = opened(), Dispute("t", "s1", "r1", (5,))
    assert source.receive_dispute(dispute) == [BlocksDisputed("t", (5,))]
    assert source.num_open == 1
    assert answers(source.receive(note(NoteKind.DONE), READER, 1.0)) == [NoteKind.CONFIRM]
    assert source.receive_dispute(dispute) == [BlocksDisputed("t", (5,))]
    source.tick(1000.0)  # forgotten
    assert source.receive_dispute(dispute) == []


@pytest.mark.parametrize(
    "strange", [Dispute("t2", "s1", "r1", (5,)), Dispute("t", "s0", "r1", (5,)), Dispute("t", "s1", "r0", (5,))]
)
def test_strangers_dispute_nothing(strange: Dispute) -> None:
    source = opened()
    assert source.receive_dispute(strange) == []
    source.receive(note(NoteKind.DONE), READER, 1.0)
    assert source.receive_dispute(strange) == []
