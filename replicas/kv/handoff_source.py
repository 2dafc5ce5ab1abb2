"""The source's half of the handoff protocol, as a pure state machine: no I/O, no clock, no torch.

    offer --> OPEN --DONE while the lease lives--> confirmed      (once all parts have been offered)
               |----DROP--------------------------> dropped
               |----lease ends--------------------> expired
               |----cancel------------------------> cancelled
               `----the reader is dead------------> peer dead

Every arrow ends in exactly one SourceReleased. Outcomes are remembered and answered again, so that a resent
message changes nothing. Only a message with the right id, both epochs and the reader's agent name is acted on.

A prompt may be offered in parts, each when it is computed. The lease is one, from the first part on. What the reader
has not answered is sent again, all in one: a RENEW says how many blocks it has been told of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import structs

from replicas.kv.block_digests import DIGEST_BYTES
from replicas.kv.handoff_actions import (
    Action,
    Backoff,
    BlocksDisputed,
    HandoffTiming,
    SendNote,
    SourceOutcome,
    SourceReleased,
)
from replicas.messages import Dispute, Handoff, NoteKind, TransferNote

_Key = tuple[str, str]  # transfer id, reader's epoch; the source's epoch is always this engine's


@dataclass(slots=True)
class _Lease:
    """handoff: all parts so far, as one. num_heard: of its blocks, those that the reader has been told of."""

    handoff: Handoff
    reader_agent: str
    deadline_s: float  # renewals do not reach past it
    expires_s: float
    resend: Backoff
    num_heard: int = 0

    @property
    def key(self) -> _Key:
        return (self.handoff.transfer_id, self.handoff.reader_epoch)

    @property
    def is_answered(self) -> bool:
        return self.num_heard == len(self.handoff.block_ids)

    @property
    def due_s(self) -> float:
        return self.expires_s if self.is_answered else min(self.expires_s, self.resend.due_s)

    def follows(self, part: Handoff) -> bool:
        """Whether the part goes on where the parts so far end."""
        is_next = part.first_block == len(self.handoff.block_ids) and not self.handoff.is_last
        return is_next and bool(part.block_ids) and part.reader_epoch == self.handoff.reader_epoch

    def unheard(self) -> Handoff:
        """What the reader has not been told of, as far as is known: one part."""
        if not self.num_heard:
            return self.handoff
        whole, first = self.handoff, self.num_heard
        digests = None if whole.digests is None else whole.digests[first * DIGEST_BYTES :]
        return structs.replace(whole, first_block=first, block_ids=whole.block_ids[first:], digests=digests)


@dataclass(slots=True)
class _Ended:
    outcome: SourceOutcome
    forget_s: float
    was_offered: bool


class HandoffSource:
    """Leases of one engine's blocks. Time is monotonic seconds, given with every call, never going back."""

    def __init__(self, epoch: str, timing: HandoffTiming) -> None:
        self._epoch = epoch
        self._timing = timing
        self._leases: dict[str, _Lease] = {}
        self._ended: dict[_Key, _Ended] = {}  # oldest first
        self._next_due_s = math.inf  # never later than the earliest time at which tick has something to do

    @property
    def num_open(self) -> int:
        return len(self._leases)

    def is_open(self, transfer_id: str) -> bool:
        return transfer_id in self._leases

    def is_open_with(self, agent_name: str) -> bool:
        """Whether this reader holds a lease."""
        return any(lease.reader_agent == agent_name for lease in self._leases.values())

    def offer(self, handoff: Handoff, reader_agent: str, deadline_s: float, now_s: float) -> list[Action]:
        """Open a lease on handoff.block_ids for handoff.lease_s, or, of a later part, take them into it; and send the
        part until it is answered. A later part of a transfer that has ended meanwhile is ignored.

        deadline_s: absolute, that of the first part; the lease ends by then, however often it is renewed. A drop that
        came before is honoured at once. Raises ValueError for an id that was offered before, a part that does not
        follow, or a foreign epoch; nothing changes.
        """
        transfer_id = handoff.transfer_id
        lease, ended = self._leases.get(transfer_id), self._ended.get((transfer_id, handoff.reader_epoch))
        if handoff.source_epoch != self._epoch:
            raise ValueError(f"epoch {handoff.source_epoch} is not {self._epoch}")
        if handoff.first_block:
            if lease is None and ended is not None:
                return []
            if lease is None or lease.reader_agent != reader_agent or not lease.follows(handoff):
                raise ValueError(f"transfer {transfer_id}: block {handoff.first_block} does not come next")
            return self._go_on(lease, handoff, now_s)
        if lease is not None or (ended is not None and ended.was_offered):
            raise ValueError(f"transfer {transfer_id} was offered before")
        if ended is not None:
            ended.was_offered = True
            return [SourceReleased(transfer_id, ended.outcome)]
        lease = _Lease(
            handoff=handoff,
            reader_agent=reader_agent,
            deadline_s=deadline_s,
            expires_s=min(now_s + handoff.lease_s, deadline_s),
            resend=self._backoff(now_s),
        )
        self._leases[transfer_id] = lease
        self._next_due_s = min(self._next_due_s, lease.due_s)
        return [SendNote(reader_agent, handoff)]

    def unreachable(self, handoff: Handoff, now_s: float) -> list[Action]:
        """The reader of this first part can't be reached: it is offered and over at once."""
        key = (handoff.transfer_id, handoff.reader_epoch)
        self._remember(key, SourceOutcome.PEER_UNREACHABLE, was_offered=True, lease_s=handoff.lease_s, now_s=now_s)
        return [SourceReleased(handoff.transfer_id, SourceOutcome.PEER_UNREACHABLE)]

    def receive(self, note: TransferNote, agent_name: str, now_s: float) -> list[Action]:
        """A note from a reader. Kinds that only a source sends are ignored."""
        if note.kind not in (NoteKind.DONE, NoteKind.RENEW, NoteKind.DROP):
            return []
        if note.source_epoch != self._epoch:
            return self._refuse(note, agent_name, "another epoch")
        actions: list[Action] = []
        lease = self._leases.get(note.transfer_id)
        if lease is not None and (note.reader_epoch, agent_name) == (lease.handoff.reader_epoch, lease.reader_agent):
            if now_s < lease.expires_s:
                return self._answer_open(lease, note, now_s)
            # The clock decides, not the moment at which somebody looked at it.
            actions += self._end(lease, SourceOutcome.EXPIRED, now_s)
        return actions + self._answer_ended(note, agent_name, now_s)

    def receive_dispute(self, dispute: Dispute) -> list[Action]:
        """Of a transfer that is open or was. It changes nothing here: how the transfer ends, its notes say."""
        key = (dispute.transfer_id, dispute.reader_epoch)
        lease = self._leases.get(dispute.transfer_id)
        is_known = key in self._ended or (lease is not None and lease.key == key)
        if dispute.source_epoch != self._epoch or not is_known:
            return []
        return [BlocksDisputed(dispute.transfer_id, dispute.block_ids)]

    def cancel(self, transfer_id: str, now_s: float) -> list[Action]:
        """The engine takes its offer back: tell the reader and release. Nothing for a transfer that is not open."""
        lease = self._leases.get(transfer_id)
        return [] if lease is None else self._end(lease, SourceOutcome.CANCELLED, now_s)

    def cancel_all(self, now_s: float) -> list[Action]:
        return [action for transfer_id in list(self._leases) for action in self.cancel(transfer_id, now_s)]

    def peer_dead(self, agent_name: str, now_s: float) -> list[Action]:
        """The reader is known to be dead: its leases end. Should it come back, it will be refused."""
        dead = [lease for lease in self._leases.values() if lease.reader_agent == agent_name]
        return [action for lease in dead for action in self._end(lease, SourceOutcome.PEER_DEAD, now_s)]

    def tick(self, now_s: float) -> list[Action]:
        """Expire leases, send unanswered handoffs again, forget old outcomes. Cheap when nothing is due."""
        if now_s < self._next_due_s:
            return []
        actions: list[Action] = []
        for lease in list(self._leases.values()):
            if now_s >= lease.expires_s:
                actions += self._end(lease, SourceOutcome.EXPIRED, now_s)
            elif not lease.is_answered and now_s >= lease.resend.due_s:
                lease.resend.advance(now_s)
                actions.append(SendNote(lease.reader_agent, lease.unheard()))
        self._forget(now_s)
        self._next_due_s = min((lease.due_s for lease in self._leases.values()), default=math.inf)
        if self._ended:
            self._next_due_s = min(self._next_due_s, next(iter(self._ended.values())).forget_s)
        return actions

    def _go_on(self, lease: _Lease, part: Handoff, now_s: float) -> list[Action]:
        """A part more, under the same lease."""
        if now_s >= lease.expires_s:
            return self._end(lease, SourceOutcome.EXPIRED, now_s)
        if lease.is_answered:
            lease.resend = self._backoff(now_s)
        before = lease.handoff
        digests = None if before.digests is None or part.digests is None else before.digests + part.digests
        lease.handoff = structs.replace(
            part, first_block=0, block_ids=before.block_ids + part.block_ids, digests=digests
        )
        self._next_due_s = min(self._next_due_s, lease.due_s)
        return [SendNote(lease.reader_agent, part)]

    def _backoff(self, now_s: float) -> Backoff:
        return Backoff(now_s, self._timing.resend_s, self._timing.max_resend_s)

    def _answer_open(self, lease: _Lease, note: TransferNote, now_s: float) -> list[Action]:
        if note.kind is NoteKind.RENEW:
            lease.num_heard = max(lease.num_heard, min(note.num_blocks, len(lease.handoff.block_ids)))
            # Never shorten: a renewal that was overtaken by a later one must not undo it.
            lease.expires_s = max(lease.expires_s, min(now_s + lease.handoff.lease_s, lease.deadline_s))
            return []
        if note.kind is NoteKind.DONE and not lease.handoff.is_last:
            return []  # nobody can have read what was not offered
        outcome = SourceOutcome.CONFIRMED if note.kind is NoteKind.DONE else SourceOutcome.DROPPED
        return self._end(lease, outcome, now_s)

    def _answer_ended(self, note: TransferNote, agent_name: str, now_s: float) -> list[Action]:
        key = (note.transfer_id, note.reader_epoch)
        ended = self._ended.get(key)
        if note.kind is NoteKind.DROP:
            if ended is None and note.transfer_id not in self._leases:
                self._remember(key, SourceOutcome.DROPPED, was_offered=False, lease_s=0.0, now_s=now_s)
            return []
        if ended is None:
            return self._refuse(note, agent_name, "unknown transfer")
        if ended.outcome is SourceOutcome.CONFIRMED:
            # Also for a late RENEW: the DONE that was confirmed said that the read had ended.
            return [SendNote(agent_name, self._note(NoteKind.CONFIRM, note.transfer_id, note.reader_epoch))]
        return self._refuse(note, agent_name, ended.outcome)

    def _end(self, lease: _Lease, outcome: SourceOutcome, now_s: float) -> list[Action]:
        """Close a lease: remember the outcome, tell the reader what it does not know yet, release."""
        transfer_id, reader_epoch = lease.key
        del self._leases[transfer_id]
        self._remember(lease.key, outcome, was_offered=True, lease_s=lease.handoff.lease_s, now_s=now_s)
        kinds = {
            SourceOutcome.CONFIRMED: NoteKind.CONFIRM,
            SourceOutcome.EXPIRED: NoteKind.REFUSE,
            SourceOutcome.CANCELLED: NoteKind.DROP,
        }
        actions: list[Action] = []
        if outcome in kinds:
            note = self._note(kinds[outcome], transfer_id, reader_epoch, outcome)
            actions.append(SendNote(lease.reader_agent, note))
        actions.append(SourceReleased(transfer_id, outcome))
        return actions

    def _refuse(self, note: TransferNote, agent_name: str, reason: str) -> list[Action]:
        """Answer with the note's own epochs, so that its sender knows what is meant. A drop needs no answer."""
        if note.kind is NoteKind.DROP:
            return []
        refusal = TransferNote(NoteKind.REFUSE, note.transfer_id, note.source_epoch, note.reader_epoch, reason, 0)
        return [SendNote(agent_name, refusal)]

    def _note(self, kind: NoteKind, transfer_id: str, reader_epoch: str, reason: str = "") -> TransferNote:
        return TransferNote(kind, transfer_id, self._epoch, reader_epoch, reason, 0)

    def _remember(self, key: _Key, outcome: SourceOutcome, *, was_offered: bool, lease_s: float, now_s: float) -> None:
        self._ended.pop(key, None)
        forget_s = now_s + max(self._timing.remember_s, 2 * lease_s)
        self._ended[key] = _Ended(outcome, forget_s, was_offered)
        self._next_due_s = min(self._next_due_s, forget_s)

    def _forget(self, now_s: float) -> None:
        # Oldest first is nearly in order of forget_s: one with a long lease only delays those behind it.
        while self._ended:
            key = next(iter(self._ended))
            if now_s < self._ended[key].forget_s:
                break
            del self._ended[key]
