"""The peers that one engine's transport has loaded, from their first transfer until they have gone.

Nobody tells an engine that a replica has left: it still ends what it has begun, for any router, and only it knows when.
So all peers with which nothing is open are asked now and then; one whose process has ended can't be, and is unloaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from replicas.channels.wire import encode
from replicas.kv.kv_transport import KvTransport, PeerUnreachable
from replicas.kv.pair_rate import PairRates
from replicas.kv.prober import Prober
from replicas.messages import Dispute, Handoff, NoteKind, TransferNote, TransferPeer

_PROBE = "probe"
_MEASURED_S = 0.25  # for so long after a peer's word that it measures us

logger = logging.getLogger(__name__)


class LoadedPeers:
    """For the thread that owns the transport. Time is monotonic seconds. rates, prober: of those that are read."""

    def __init__(
        self, transport: KvTransport, ask_every_s: float, now_s: float, on_probe_failed: Callable[[str], None]
    ) -> None:
        """on_probe_failed: as `Prober`."""
        self.rates = PairRates()
        self.prober = Prober(transport, self.rates, self._announce_probe, on_probe_failed)
        self._transport = transport
        self._ask_every_s = ask_every_s
        self._measured_until_s = -math.inf
        self._next_ask_s = now_s + ask_every_s
        self._peers: dict[str, TransferPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def load(self, peer: TransferPeer) -> None:
        """Make it reachable. Idempotent. Raises PeerUnreachable when its metadata is unusable."""
        self._transport.load_peer(peer)
        self._peers[peer.agent_name] = peer

    def load_source(self, peer: TransferPeer) -> None:
        """As load, one that will be read from: it is measured when it is new, and was not reached by mistake."""
        is_new = peer.agent_name not in self._peers
        self.load(peer)
        if is_new and peer.fingerprint == self._transport.local_peer().fingerprint:
            self.prober.meet(peer)

    def check(self, peer: TransferPeer) -> None:
        """Load it, and say something: raises PeerUnreachable when that fails, or the connection is known to be broken.

        One that has never been used is made by this, which takes some milliseconds that a handoff then need not.
        """
        self.load(peer)
        self._transport.notify(peer.agent_name, _greeting(self._transport.local_peer(), peer))

    def forget(self, agent_name: str) -> None:
        """Unload it; unknown names are fine."""
        self._peers.pop(agent_name, None)
        self.prober.forget(agent_name)
        self.rates.forget(agent_name)
        self._transport.remove_peer(agent_name)

    def ask_all(self, is_open: Callable[[str], bool], now_s: float) -> None:
        """Unload those that have gone. is_open: whether some transfer with a peer is. Cheap when it is not yet time.

        A connection that broke between two that live is found likewise: their next transfer makes another.
        """
        if now_s < self._next_ask_s:
            return
        self._next_ask_s = now_s + self._ask_every_s
        for peer in [peer for name, peer in self._peers.items() if not is_open(name)]:
            try:
                self.check(peer)
            except PeerUnreachable as error:
                self.forget(peer.agent_name)
                extra = {"event": "peer_gone", "peer": peer.agent_name, "reason": str(error)}
                logger.info("a peer has gone", extra=extra)

    def hear(self, message: Handoff | TransferNote | Dispute, now_s: float) -> None:
        """A peer has sent this. Mutates if it is about to measure how fast it reads from here."""
        if not message.transfer_id and isinstance(message, TransferNote) and message.reason == _PROBE:
            self._measured_until_s = now_s + _MEASURED_S

    def are_measured(self, now_s: float) -> bool:
        """Whether one of them is measured here, or measures: polls bring that on."""
        return self.prober.is_busy or now_s < self._measured_until_s

    def _announce_probe(self, peer: TransferPeer) -> None:
        """Tell it that it is measured: it polls then as often as while its KV is read. Raises PeerUnreachable."""
        self._transport.notify(peer.agent_name, _greeting(self._transport.local_peer(), peer, _PROBE))


def _greeting(local: TransferPeer, peer: TransferPeer, reason: str = "") -> bytes:
    """A note about no transfer, of a kind that is never answered: both halves of the protocol ignore it."""
    return encode(TransferNote(NoteKind.CONFIRM, "", local.epoch, peer.epoch, reason, 0))
