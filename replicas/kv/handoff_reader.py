"""The reader's half of the handoff protocol, as a pure state machine: no I/O, no clock, no torch.

    expect --> WAITING --handoff--> OFFERED --read_into--> READING --last read ended--> CONFIRMING --> KvReady
                  |                    |                   |    ^                          |
                  |                    |          read ended    a part more                |
                  |                    |                   v    |                          |
                  |                    |`- nothing to read: BETWEEN - all is kept -------->|
                  `--------------------`----------------------`----------------------------`--> KvLost

A handoff may come in parts; what a part tells of is read while the source computes the next one. Parts count in their
order: one whose predecessor is missing is not taken, and the answer says up to where they are known. One read of a
transfer is open at a time; the last one carries the DONE.

KvReady needs the last part, the source's CONFIRM and, when there are digests, their agreement for every block that was
read. Every expect ends in exactly one KvReady or KvLost. The blocks given to read_into have a second owner until the
last read's handle ends: a transfer that ends before its read leaves an orphan, and an orphan that stays is quarantined,
for ever if need be. Where all blocks are kept no read carries the DONE: it is sent by itself, and ends the lease like
any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from replicas.kv.expected_transfer import ExpectedTransfer, TransferPhase
from replicas.kv.handoff_actions import (
    Action,
    Backoff,
    CheckDigests,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    KvReady,
    LastPartArrived,
    LossReason,
    ReadReleased,
    SendNote,
    StartRead,
)
from replicas.messages import Dispute, Handoff, NoteKind, TransferNote, TransferPeer

# A drop would tell the source nothing: it knows, or is dead.
_SOURCE_KNOWS = frozenset({LossReason.REFUSED, LossReason.DROPPED, LossReason.PEER_DEAD})


class HandoffReader:
    """Transfers that one engine expects. Time is monotonic seconds, given with every call, never going back.

    require_digests: a handoff without digests is refused (verification must not be switched off from outside).
    """

    def __init__(self, epoch: str, fingerprint: str, timing: HandoffTiming, require_digests: bool) -> None:
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._timing = timing
        self._require_digests = require_digests
        self._transfers: dict[str, ExpectedTransfer] = {}
        self._orphans: dict[str, float] = {}  # reads in flight of ended transfers -> when they count as quarantined
        self._ended: dict[str, float] = {}  # -> when to forget; oldest first
        self._next_due_s = math.inf  # never later than the earliest time at which tick has something to do

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    def is_open_with(self, agent_name: str) -> bool:
        """Whether something is expected of this source."""
        return any(transfer.peer.agent_name == agent_name for transfer in self._transfers.values())

    def is_open(self, transfer_id: str) -> bool:
        return transfer_id in self._transfers

    def is_quarantined(self, transfer_id: str, now_s: float) -> bool:
        return now_s >= self._orphans.get(transfer_id, math.inf)

    def num_quarantined(self, now_s: float) -> int:
        """Reads in flight quarantine_s after their transfer ended. Their blocks stay held. Any thread may ask."""
        return sum(now_s >= since_s for since_s in list(self._orphans.values()))

    # -- the engine's commands -----------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: str,
        source: TransferPeer,
        prompt_len: int,
        num_blocks: int | None,
        deadline_s: float,
        now_s: float,
    ) -> list[Action]:
        """Wait for this handoff until deadline_s (absolute). num_blocks: of a prompt; None: the source decodes the
        request, and says how many there are when it has stopped. Raises ValueError for an id known already."""
        if transfer_id in self._transfers or transfer_id in self._orphans or transfer_id in self._ended:
            raise ValueError(f"transfer {transfer_id} was expected before")
        transfer = ExpectedTransfer(transfer_id, source, prompt_len, num_blocks, deadline_s)
        self._transfers[transfer_id] = transfer
        self._wake(transfer)
        if source.fingerprint != self._fingerprint:
            detail = f"source has {source.fingerprint}, this engine {self._fingerprint}"
            return self._lose(transfer, LossReason.MISMATCH, detail, now_s)
        return []

    def read_into(
        self, transfer_id: str, local_block_ids: tuple[int, ...], num_kept: int, now_s: float
    ) -> list[Action]:
        """Blocks for the whole prompt, the first num_kept of which hold their KV already: only the others are read.

        ReadReleased follows, at once when nothing is to be read or the transfer has ended meanwhile. Raises ValueError
        when no handoff has arrived, blocks were given before, or they are not what the handoff needs.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None and transfer_id not in self._orphans:
            return [ReadReleased(transfer_id)]
        if transfer is None or transfer.phase is not TransferPhase.OFFERED:
            raise ValueError(f"transfer {transfer_id} is not waiting for blocks")
        transfer.give(local_block_ids, num_kept)
        transfer.phase = TransferPhase.BETWEEN
        return self._go_on(transfer, now_s)

    def cancel(self, transfer_id: str, now_s: float) -> list[Action]:
        """The engine gives up: KvLost(CANCELLED) now. Nothing for a transfer that has ended."""
        return self.fail(transfer_id, LossReason.CANCELLED, "", now_s)

    def cancel_all(self, now_s: float) -> list[Action]:
        return [action for transfer_id in list(self._transfers) for action in self.cancel(transfer_id, now_s)]

    def fail(self, transfer_id: str, reason: LossReason, detail: str, now_s: float) -> list[Action]:
        """End a transfer without its KV. Nothing for a transfer that has ended."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._lose(transfer, reason, detail, now_s)

    def peer_dead(self, agent_name: str, now_s: float) -> list[Action]:
        """The source is known to be dead: whatever it did not confirm is lost."""
        return [
            action
            for transfer in list(self._transfers.values())
            if transfer.peer.agent_name == agent_name and not transfer.confirmed
            for action in self._lose(transfer, LossReason.PEER_DEAD, agent_name, now_s)
        ]

    # -- messages of the source ----------------------------------------------------------------------------------

    def receive_handoff(self, handoff: Handoff, agent_name: str, now_s: float) -> list[Action]:
        """A part, perhaps not the first copy of it. One that nobody waits for is answered by a drop."""
        transfer = self._match(handoff, agent_name)
        if transfer is None:
            epochs = (handoff.source_epoch, handoff.reader_epoch)
            return [SendNote(agent_name, TransferNote(NoteKind.DROP, handoff.transfer_id, *epochs, "unknown", 0))]
        if transfer.phase is TransferPhase.CONFIRMING:
            return [SendNote(agent_name, self._note(NoteKind.DONE, transfer))]
        mismatch = transfer.mismatch(handoff, self._fingerprint, self._require_digests)
        if mismatch:
            return self._lose(transfer, LossReason.MISMATCH, mismatch, now_s)
        is_news = transfer.take(handoff)
        actions = self._renew(transfer, now_s)
        if not is_news:
            return actions  # our answer was lost, this copy was late, or it was early
        if transfer.phase is TransferPhase.WAITING:
            transfer.phase = TransferPhase.OFFERED
            return [*actions, HandoffArrived(transfer.transfer_id, handoff)]
        if transfer.is_told:
            actions.append(LastPartArrived(transfer.transfer_id, handoff))
        return actions + self._go_on(transfer, now_s) if transfer.phase is TransferPhase.BETWEEN else actions

    def receive(self, note: TransferNote, agent_name: str, now_s: float) -> list[Action]:
        """A note from a source. Kinds that only a reader sends, and strangers' notes, are ignored."""
        transfer = self._match(note, agent_name)
        if transfer is None or transfer.confirmed:
            return []
        if note.kind is NoteKind.REFUSE:
            return self._lose(transfer, LossReason.REFUSED, note.reason, now_s)
        if note.kind is NoteKind.DROP:
            return self._lose(transfer, LossReason.DROPPED, note.reason, now_s)
        # Before the last read nothing can have been confirmed; during it, its own DONE may have been faster than our
        # poll.
        is_last_read = transfer.phase is TransferPhase.READING and transfer.is_all_ordered
        if note.kind is NoteKind.CONFIRM and (is_last_read or transfer.phase is TransferPhase.CONFIRMING):
            transfer.confirmed = True
            transfer.resend = None
            return self._finish(transfer, now_s)
        return []

    # -- the read ------------------------------------------------------------------------------------------------

    def read_ended(self, transfer_id: str, ok: bool, detail: str, now_s: float) -> list[Action]:
        """The read's handle has ended, or the read could not be started: nothing more will land in the blocks."""
        if self._orphans.pop(transfer_id, None) is not None:
            return [ReadReleased(transfer_id)]
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.phase is not TransferPhase.READING:
            raise ValueError(f"transfer {transfer_id} has no read in flight")
        if not ok:
            transfer.phase = TransferPhase.CONFIRMING
            return [ReadReleased(transfer_id), *self._lose(transfer, LossReason.READ_FAILED, detail, now_s)]
        transfer.phase = TransferPhase.BETWEEN
        check = transfer.read()
        if not self._require_digests:
            return self._go_on(transfer, now_s)
        # The next read is under way while these blocks are digested. If they differ, it was in vain.
        transfer.num_unchecked += len(check.local_block_ids)
        return [*self._go_on(transfer, now_s), check]

    def digests_checked(self, check: CheckDigests, wrong: Sequence[int], now_s: float) -> list[Action]:
        """Answer to CheckDigests. wrong: places among its blocks, ascending. Nothing for a transfer that has ended."""
        transfer = self._transfers.get(check.transfer_id)
        if transfer is None:
            return []
        if wrong:
            detail = transfer.describe_wrong(check, wrong)
            dispute = Dispute(check.transfer_id, transfer.peer.epoch, self._epoch, transfer.disputed(check, wrong))
            lost = self._lose(transfer, LossReason.DIGEST_MISMATCH, detail, now_s)
            return [SendNote(transfer.peer.agent_name, dispute), *lost]
        transfer.num_unchecked -= len(check.local_block_ids)
        return self._finish(transfer, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Deadlines, renewals, resending DONE, forgetting. Cheap when nothing is due."""
        if now_s < self._next_due_s:
            return []
        actions: list[Action] = []
        for transfer in list(self._transfers.values()):
            if now_s >= transfer.deadline_s:
                actions += self._lose(transfer, LossReason.DEADLINE, transfer.phase.value, now_s)
                continue
            if now_s >= transfer.renew_s:
                actions += self._renew(transfer, now_s)
            if transfer.resend is not None and now_s >= transfer.resend.due_s:
                transfer.resend.advance(now_s)
                actions.append(SendNote(transfer.peer.agent_name, self._note(NoteKind.DONE, transfer)))
        while self._ended and now_s >= next(iter(self._ended.values())):
            del self._ended[next(iter(self._ended))]
        self._next_due_s = min((transfer.due_s for transfer in self._transfers.values()), default=math.inf)
        self._next_due_s = min(self._next_due_s, next(iter(self._ended.values()), math.inf))
        return actions

    # -- inside --------------------------------------------------------------------------------------------------

    def _match(self, message: Handoff | TransferNote, agent_name: str) -> ExpectedTransfer | None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return None
        expected = (transfer.peer.epoch, self._epoch, transfer.peer.agent_name)
        return transfer if (message.source_epoch, message.reader_epoch, agent_name) == expected else None

    def _renew(self, transfer: ExpectedTransfer, now_s: float) -> list[Action]:
        transfer.renew_s = now_s + (transfer.lease_s or self._timing.lease_s) / 3
        self._wake(transfer)
        return [SendNote(transfer.peer.agent_name, self._note(NoteKind.RENEW, transfer))]

    def _go_on(self, transfer: ExpectedTransfer, now_s: float) -> list[Action]:
        """No read of it is open: read what can be read, or, when all is here, wait for the source's word."""
        transfer_id, agent_name = transfer.transfer_id, transfer.peer.agent_name
        if (ordered := transfer.order()) is not None:
            transfer.phase = TransferPhase.READING
            note = self._note(NoteKind.DONE if transfer.is_all_ordered else NoteKind.RENEW, transfer)
            return [StartRead(transfer_id, transfer.peer, *ordered, note)]
        if not transfer.is_all_ordered:
            return []
        transfer.phase = TransferPhase.CONFIRMING
        transfer.renew_s = math.inf
        actions: list[Action] = []
        if transfer.num_kept == transfer.num_blocks:  # else the last read has carried the first DONE
            actions.append(SendNote(agent_name, self._note(NoteKind.DONE, transfer)))
        if not transfer.confirmed:
            transfer.resend = Backoff(now_s, self._timing.resend_s, self._timing.max_resend_s)
            self._wake(transfer)
        return [*actions, ReadReleased(transfer_id), *self._finish(transfer, now_s)]

    def _finish(self, transfer: ExpectedTransfer, now_s: float) -> list[Action]:
        """KvReady when everything it needs is there."""
        if transfer.phase is not TransferPhase.CONFIRMING or not transfer.confirmed or transfer.num_unchecked:
            return []
        self._forget_later(transfer, now_s)
        return [KvReady(transfer.transfer_id)]

    def _lose(self, transfer: ExpectedTransfer, reason: LossReason, detail: str, now_s: float) -> list[Action]:
        self._forget_later(transfer, now_s)
        actions: list[Action] = []
        if transfer.phase is TransferPhase.READING:
            self._orphans[transfer.transfer_id] = now_s + self._timing.quarantine_s
        if not transfer.confirmed and reason not in _SOURCE_KNOWS:
            actions.append(SendNote(transfer.peer.agent_name, self._note(NoteKind.DROP, transfer, reason)))
        actions.append(KvLost(transfer.transfer_id, reason, detail))
        if transfer.phase is TransferPhase.BETWEEN:
            actions.append(ReadReleased(transfer.transfer_id))
        return actions

    def _forget_later(self, transfer: ExpectedTransfer, now_s: float) -> None:
        del self._transfers[transfer.transfer_id]
        forget_s = now_s + self._timing.remember_s
        self._ended[transfer.transfer_id] = forget_s
        self._next_due_s = min(self._next_due_s, forget_s)

    def _wake(self, transfer: ExpectedTransfer) -> None:
        self._next_due_s = min(self._next_due_s, transfer.due_s)

    def _note(self, kind: NoteKind, transfer: ExpectedTransfer, reason: str = "") -> TransferNote:
        num_told = transfer.num_told if kind is NoteKind.RENEW else 0
        return TransferNote(kind, transfer.transfer_id, transfer.peer.epoch, self._epoch, reason, num_told)
