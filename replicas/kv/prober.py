"""Measures each peer that an engine will read from when they first meet, by reads into memory of the transport's own.

One pair at a time, so that they do not measure each other; no transfer waits for them. A probe that fails costs nothing
but its figures: then the first long read of a prompt's KV gives the rate, or some short ones do (`pair_rate`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from replicas.kv.kv_transport import KvTransport, ReadHandle, ReadState
from replicas.kv.pair_rate import PairRates
from replicas.kv.probe import Probe
from replicas.messages import TransferPeer

_GIVE_UP_S = 5.0  # after which a read of a probe is not waited for; the first makes the connection, too
_EAGER_S = 0.02  # for so long its end is looked for at once

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Measuring:
    peer: TransferPeer
    probe: Probe
    handle: ReadHandle
    begun_s: float
    is_disturbed: bool = False  # KV was read from the same peer meanwhile


class Prober:
    """For the thread that owns the transport. Time is monotonic seconds.

    announce: tells a peer that it is about to be read; may raise. on_failed: hears why a probe failed.
    """

    def __init__(
        self,
        transport: KvTransport,
        rates: PairRates,
        announce: Callable[[TransferPeer], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._transport, self._rates, self._announce, self._on_failed = transport, rates, announce, on_failed
        self._waiting: OrderedDict[str, TransferPeer] = OrderedDict()
        self._measuring: _Measuring | None = None
        self._let_go_of: list[ReadHandle] = []  # until they end; what lands, lands where nobody looks

    @property
    def is_busy(self) -> bool:
        """Whether a poll may bring a measurement on."""
        return self._measuring is not None

    @property
    def num_in_flight(self) -> int:
        """Reads that have not ended, for all that is known."""
        return len(self._let_go_of) + (self._measuring is not None)

    def is_eager(self, now_s: float) -> bool:
        """Whether its read may end any moment, and that moment matters."""
        return self._measuring is not None and now_s - self._measuring.begun_s < _EAGER_S

    def meet(self, peer: TransferPeer) -> None:
        """Measure this peer, loaded just now, as soon as it is its turn. Mutates."""
        self._waiting[peer.agent_name] = peer

    def forget(self, agent_name: str) -> None:
        """It has gone. Mutates; unknown names are fine."""
        self._waiting.pop(agent_name, None)
        if self._measuring is not None and self._measuring.peer.agent_name == agent_name:
            self._let_go()

    def stop(self) -> None:
        """Begin nothing more. Mutates; reads in flight are looked after until they end."""
        self._waiting.clear()
        self._let_go()

    def turn(self, is_read_from: Callable[[str], bool], now_s: Callable[[], float]) -> None:
        """Look after the reads, begin what is due. A transport that can't begin one fails that probe.

        is_read_from: whether KV is being read from this agent now.
        """
        self._let_go_of = [handle for handle in self._let_go_of if not self._has_ended(handle)]
        if self._measuring is not None:
            self._look(self._measuring, is_read_from, now_s)
        elif self._waiting:
            self._begin_next(is_read_from, now_s)

    def _begin_next(self, is_read_from: Callable[[str], bool], now_s: Callable[[], float]) -> None:
        agent_name, peer = self._waiting.popitem(last=False)
        if self._rates.of(agent_name) is not None:
            return  # its reads have told meanwhile
        if is_read_from(agent_name):
            self._waiting[agent_name] = peer  # when it is quiet
            return
        local = self._transport.local_peer()
        smaller_bytes = min(one.num_blocks * one.block_bytes for one in (local, peer))
        try:
            self._announce(peer)
            self._post(peer, Probe(smaller_bytes), now_s)
        except Exception as error:
            self._fail(peer, str(error) or repr(error))

    def _post(self, peer: TransferPeer, probe: Probe, now_s: Callable[[], float]) -> None:
        assert probe.next_bytes is not None
        begun_s = now_s()
        handle = self._transport.start_probe(peer, probe.next_bytes)
        self._measuring = _Measuring(peer, probe, handle, begun_s)

    def _look(self, now: _Measuring, is_read_from: Callable[[str], bool], now_s: Callable[[], float]) -> None:
        now.is_disturbed |= is_read_from(now.peer.agent_name)
        state = self._transport.poll_read(now.handle)
        duration_s = now_s() - now.begun_s
        if state is ReadState.READING and duration_s < _GIVE_UP_S:
            return
        self._let_go()
        if state is not ReadState.DONE:
            why = f"no end within {_GIVE_UP_S:g} s" if state is ReadState.READING else f"the read: {state.value}"
            self._fail(now.peer, why)
            return
        if not now.is_disturbed:
            now.probe.took(duration_s)
        if now.is_disturbed or now.probe.next_bytes is None:
            self._conclude(now)
            return
        try:
            self._announce(now.peer)
            self._post(now.peer, now.probe, now_s)
        except Exception as error:
            self._fail(now.peer, str(error) or repr(error))

    def _conclude(self, now: _Measuring) -> None:
        if self._rates.of(now.peer.agent_name) is not None:
            return  # its reads have told meanwhile
        rate = now.probe.rate(now.peer.replica_id)
        if rate is None:
            self.meet(now.peer)  # again, when it is quiet
            return
        self._rates.measured(now.peer.agent_name, rate, now.probe.num_bytes)

    def _fail(self, peer: TransferPeer, reason: str) -> None:
        extra = {"event": "transfer_probe_failed", "peer": peer.replica_id, "reason": reason}
        logger.warning("a pair was not measured", extra=extra)
        self._on_failed(f"probe of {peer.agent_name}: {reason}")

    def _let_go(self) -> None:
        if self._measuring is not None:
            if not self._has_ended(self._measuring.handle):
                self._let_go_of.append(self._measuring.handle)
            self._measuring = None

    def _has_ended(self, handle: ReadHandle) -> bool:
        """And if it has: forgets it."""
        if self._transport.poll_read(handle) not in (ReadState.DONE, ReadState.FAILED):
            return False
        self._transport.release_read(handle)
        return True
