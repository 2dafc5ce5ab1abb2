"""Carries out what the two halves of the handoff protocol order, over one transport. No thread, no sleeping.

The transfer thread turns the crank; a test may turn it by hand with a fake transport and clock. Whatever the transport,
the engine's callback, a peer's bytes or a test hook do wrong is counted, logged and costs the transfer it belongs to.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from msgspec import structs

from replicas.channels.wire import MalformedMessage, decode_notification, encode
from replicas.kv.block_digests import DigestBlocks, differing
from replicas.kv.error_counts import ErrorCounts
from replicas.kv.handoff_actions import (
    Action,
    BlocksDisputed,
    CheckDigests,
    CommandRefused,
    Event,
    HandoffTiming,
    KvLost,
    KvReady,
    LossReason,
    ReaderChecked,
    SendNote,
    SourceOutcome,
    SourceReleased,
    StartRead,
)
from replicas.kv.handoff_reader import HandoffReader
from replicas.kv.handoff_source import HandoffSource
from replicas.kv.kv_transport import KvTransport, PeerUnreachable, ReadState
from replicas.kv.loaded_peers import LoadedPeers
from replicas.kv.transfer_faults import TransferFaults, hold_point
from replicas.kv.transfer_reads import TransferReads
from replicas.messages import Dispute, Handoff, TransferPeer
from replicas.model_identity import UnlikeModels, refuse_unlike

logger = logging.getLogger(__name__)


class TransferDriver:
    """Owns the transport and both state machines. For one thread; counters may be read from others.

    on_event: gets every event; max_bytes_in_flight: as `TransferReads`; digest_blocks: None means no verification,
    neither given nor asked for.
    """

    def __init__(
        self,
        transport: KvTransport,
        on_event: Callable[[Event], None],
        timing: HandoffTiming,
        max_bytes_in_flight: int,
        digest_blocks: DigestBlocks | None,
        faults: TransferFaults | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local_peer = transport.local_peer()
        self.source = HandoffSource(self.local_peer.epoch, timing)
        self.reader = HandoffReader(
            self.local_peer.epoch, self.local_peer.fingerprint, timing, require_digests=digest_blocks is not None
        )
        self.results: Counter[str] = Counter()
        self._transport, self._on_event, self._digest_blocks = transport, on_event, digest_blocks
        self._faults, self._now_s = faults, now_s
        self._offered: dict[str, tuple[int, ...]] = {}  # blocks under a lease
        self._held: list[Action] = []
        errors = ErrorCounts(now_s)
        self.errors, self._report, self._confined = errors.counts, errors.report, errors.confined
        self.peers = LoadedPeers(transport, timing.ask_peers_s, now_s(), partial(self._report, "probe"))
        failed = partial(self._report, "read")
        self.reads = TransferReads(transport, self.reader, self.peers.rates, max_bytes_in_flight, failed)

    @property
    def is_busy(self) -> bool:
        """Something is pending that a poll may move. A quarantined read is not: it is looked at when idle, too."""
        now_s, num_reads = self._now_s(), len(self.reads.in_flight)
        moving = num_reads > self.reader.num_quarantined(now_s) or self.peers.are_measured(now_s)
        return moving or bool(self.source.num_open or self.reader.num_open or self._held)

    @property
    def is_eager(self) -> bool:
        """Something may end any moment, and how long it took matters."""
        return any(part.is_eager(self._now_s()) for part in (self.reads, self.peers.prober))

    @property
    def num_landing(self) -> int:
        """Reads, of KV or of probes, that have not ended: the memory that they write must stay."""
        return len(self.reads.in_flight) + self.peers.prober.num_in_flight

    # -- commands: none raises on account of its transfer; what is impossible becomes a CommandRefused ------------

    def check_reader(self, transfer_id: str, reader: TransferPeer) -> None:
        """Tell by a ReaderChecked whether this reader may be and can be reached, before there is anything to offer."""
        problem = ""
        try:
            refuse_unlike(self.local_peer.fingerprint, reader.fingerprint)
            self.peers.check(reader)
        except Exception as error:
            problem = str(error) or repr(error)
            self._report("refused" if isinstance(error, UnlikeModels) else "unreachable", f"{transfer_id}: {problem}")
        self._emit(ReaderChecked(transfer_id, problem))

    def offer(self, handoff: Handoff, reader: TransferPeer, deadline_s: float) -> None:
        """Digest the part's blocks if verification is on (blocks for that long), then offer them."""
        transfer_id, is_later = handoff.transfer_id, handoff.first_block > 0
        try:
            if not is_later:
                self.peers.load(reader)
            if self._digest_blocks is not None and (not is_later or self.source.is_open(transfer_id)):
                handoff = structs.replace(handoff, digests=self._digest_blocks(handoff.block_ids))
            actions = self.source.offer(handoff, reader.agent_name, deadline_s, self._now_s())
        except PeerUnreachable as error:
            self._report("unreachable", f"offer of {transfer_id}: {error}")
            self._perform(self.source.unreachable(handoff, self._now_s()))
        except Exception as error:
            # Of a later part: what its reader knows of will never be all.
            self._perform(self.source.cancel(transfer_id, self._now_s()) if is_later else [])
            self._refuse(transfer_id, "offer", error)
        else:
            if self.source.is_open(transfer_id):
                self._offered[transfer_id] = self._offered.get(transfer_id, ()) + handoff.block_ids
            self._perform(actions)

    def expect(
        self, transfer_id: str, source: TransferPeer, prompt_len: int, num_blocks: int | None, deadline_s: float
    ) -> None:
        now_s = self._now_s()
        try:
            self._perform(self.reader.expect(transfer_id, source, prompt_len, num_blocks, deadline_s, now_s))
        except ValueError as error:
            self._refuse(transfer_id, "expect", error)
            return
        try:
            self.peers.load_source(source)
        except Exception as error:
            self._perform(self.reader.fail(transfer_id, LossReason.PEER_UNREACHABLE, str(error), now_s))

    def read_into(self, transfer_id: str, local_block_ids: tuple[int, ...], num_kept: int) -> None:
        try:
            self._perform(self.reader.read_into(transfer_id, local_block_ids, num_kept, self._now_s()))
        except ValueError as error:
            self._refuse(transfer_id, "read_into", error)

    def cancel(self, transfer_id: str) -> None:
        now_s = self._now_s()
        self._perform([*self.source.cancel(transfer_id, now_s), *self.reader.cancel(transfer_id, now_s)])

    def cancel_all(self) -> None:
        self.peers.prober.stop()
        self._perform([*self.source.cancel_all(self._now_s()), *self.reader.cancel_all(self._now_s())])

    def forget_peer(self, agent_name: str) -> None:
        now_s = self._now_s()
        self._perform([*self.source.peer_dead(agent_name, now_s), *self.reader.peer_dead(agent_name, now_s)])
        self.peers.forget(agent_name)

    # -- the crank -----------------------------------------------------------------------------------------------

    def collect(self) -> list[tuple[str, bytes]]:
        """Take the notifications that have come. Commands given before they were sent must be applied between
        this and `advance`: a handoff must never overtake its own `expect`."""
        try:
            return self._transport.poll_notifications()
        except Exception as error:
            self._report("poll", f"polling notifications: {error!r}")
            return []

    def advance(self, mail: Iterable[tuple[str, bytes]]) -> None:
        """Handle notifications, then reads, then the clock. Never raises."""
        for agent_name, payload in mail:
            self._attempt(partial(self._receive, agent_name, payload))
        for transfer_id in list(self.reads.in_flight):
            self._attempt(partial(self._poll_read, transfer_id))
        held, self._held = self._held, []
        self._perform(held)
        for due in (self.source.tick, self.reader.tick, self.reads.begin_due):
            self._attempt(partial(due, self._now_s()))
        self._confined("probe", lambda: self.peers.prober.turn(self.reads.is_open_with, self._now_s))
        self._confined("internal", lambda: self.peers.ask_all(self._is_open_with, self._now_s()))

    def close(self) -> None:
        """Close the transport. Only when nothing is landing."""
        self._transport.close()

    def _receive(self, agent_name: str, payload: bytes) -> list[Action]:
        try:
            message, now_s = decode_notification(payload), self._now_s()
        except MalformedMessage as error:
            self._report("malformed", f"notification of {agent_name}: {error}")
            return []
        self.peers.hear(message, now_s)
        if isinstance(message, Handoff):
            return self.reader.receive_handoff(message, agent_name, now_s)
        if isinstance(message, Dispute):
            return self.source.receive_dispute(message)
        return [*self.source.receive(message, agent_name, now_s), *self.reader.receive(message, agent_name, now_s)]

    def _poll_read(self, transfer_id: str) -> list[Action]:
        if self._is_held("end_read"):
            return []
        # Should this raise, the read stays in flight until its deadline: nobody knows what may still land.
        state = self.reads.poll(transfer_id)
        if state is ReadState.READING:
            return []
        if state is ReadState.UNKNOWN:  # the transfer is over, its read is not: the blocks stay held, for good
            return self.reader.fail(transfer_id, LossReason.READ_FAILED, "in part", self._now_s())
        read, ok = self.reads.end(transfer_id, self._now_s()), state is ReadState.DONE
        self._confined("internal", partial(self._transport.release_read, read.handle))
        if ok and self._faults is not None:
            self._confined("hook", partial(self._faults.after_read, transfer_id, read.local_block_ids))
        return self.reader.read_ended(transfer_id, ok, "" if ok else "the transport reports an error", self._now_s())

    def _is_open_with(self, agent_name: str) -> bool:
        return any(half.is_open_with(agent_name) for half in (self.reads, self.source, self.reader))

    # -- orders and events ---------------------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], list[Action]]) -> None:
        """Take a step and carry out what it orders. A bug in it costs that step, not the thread."""
        try:
            self._perform(step())
        except Exception as error:
            self._report("internal", f"{step}: {error!r}")

    def _perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions and what follows from them, in order. Never raises."""
        pending = deque(actions)
        while pending:
            action = pending.popleft()
            if self._is_held(hold_point(action)):
                self._held.append(action)
                continue
            try:
                pending.extendleft(reversed(self._carry_out(action)))
            except Exception as error:
                self._report("internal", f"{type(action).__name__}: {error!r}")

    def _carry_out(self, action: Action) -> list[Action]:
        match action:
            case SendNote():
                self._send(action)
            case StartRead():
                self.reads.add(action)
                return self.reads.begin_due(self._now_s())
            case CheckDigests():
                return self._check_digests(action)
            case _:
                self._emit(action)
                if isinstance(action, KvLost):
                    return self.reads.withdraw(action.transfer_id, self._now_s())
        return []

    def _send(self, order: SendNote) -> None:
        try:
            self._transport.notify(order.agent_name, encode(order.message))
        except PeerUnreachable as error:
            self._report("unreachable", str(error))

    def _check_digests(self, order: CheckDigests) -> list[Action]:
        assert self._digest_blocks is not None, "the reader asks for digests only when it verifies"
        try:
            wrong = differing(self._digest_blocks(order.local_block_ids), order.digests)
        except Exception as error:
            self._report("internal", f"digests of {order.transfer_id}: {error!r}")
            return self.reader.fail(order.transfer_id, LossReason.DIGEST_MISMATCH, repr(error), self._now_s())
        return self.reader.digests_checked(order, wrong, self._now_s())

    def _emit(self, event: Event) -> None:
        match event:
            case KvReady():
                self.results["ready"] += 1
            case KvLost(transfer_id, reason, detail):
                self.results[f"lost: {reason}"] += 1
                if reason is not LossReason.CANCELLED:
                    extra = {"event": "kv_lost", "request": transfer_id, "reason": str(reason), "detail": detail}
                    logger.warning("KV of %s lost: %s: %s", transfer_id, reason, detail, extra=extra)
            case BlocksDisputed(transfer_id, block_ids):
                self._report("disputed", f"{len(block_ids)} blocks of {transfer_id} came changed, first {block_ids[0]}")
            case SourceReleased(transfer_id, outcome):
                self.results[f"source: {outcome}"] += 1
                block_ids = self._offered.pop(transfer_id, ())
                if outcome is SourceOutcome.CONFIRMED and self._faults is not None:
                    self._confined("hook", partial(self._faults.after_confirm, transfer_id, block_ids))
        self._confined("callback", partial(self._on_event, event))

    def _refuse(self, transfer_id: str, command: str, error: Exception) -> None:
        self._report("refused", f"{command} of {transfer_id}: {error}")
        self._perform([CommandRefused(transfer_id, command, str(error))])

    def _is_held(self, point: str) -> bool:
        return self._faults is not None and bool(point) and self._faults.hold(point)
