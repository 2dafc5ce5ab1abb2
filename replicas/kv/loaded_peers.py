"""The peers that one engine's transport has loaded, from their first transfer until they have gone.

Nobody tells an engine that a replica has left: it still ends what it has begun, for any router, and only it knows when.
So all peers with which nothing is open are asked now and then; one whose process has ended can't be, and is unloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from replicas.channels.wire import encode
from replicas.kv.kv_transport import KvTransport, PeerUnreachable
from replicas.messages import Handoff, NoteKind, TransferNote, TransferPeer

_PROBE = "probe"

logger = logging.getLogger(__name__)


class LoadedPeers:
    """For the thread that owns the transport. Time is monotonic seconds. on_forgotten: hears the agent name of each."""

    def __init__(
        self, transport: KvTransport, ask_every_s: float, now_s: float, on_forgotten: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._ask_every_s = ask_every_s
        self._on_forgotten = on_forgotten
        self._next_ask_s = now_s + ask_every_s
        self._peers: dict[str, TransferPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def load(self, peer: TransferPeer) -> bool:
        """Make it reachable. Idempotent: whether it was not before. Raises PeerUnreachable when its metadata is
        unusable."""
        self._transport.load_peer(peer)
        is_new = peer.agent_name not in self._peers
        self._peers[peer.agent_name] = peer
        return is_new

    def check(self, peer: TransferPeer) -> None:
        """Load it, and say something: raises PeerUnreachable when that fails, or the connection is known to be broken.

        One that has never been used is made by this, which takes some milliseconds that a handoff then need not.
        """
        self.load(peer)
        self._transport.notify(peer.agent_name, _greeting(self._transport.local_peer(), peer))

    def announce_probe(self, peer: TransferPeer) -> None:
        """Tell it that it is measured, so that it polls as often as it does while its KV is read. Raises
        PeerUnreachable."""
        self._transport.notify(peer.agent_name, _greeting(self._transport.local_peer(), peer, _PROBE))

    def forget(self, agent_name: str) -> None:
        """Unload it; unknown names are fine."""
        self._peers.pop(agent_name, None)
        self._on_forgotten(agent_name)
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


def is_probe_announced(message: Handoff | TransferNote) -> bool:
    """Whether this is what `announce_probe` says."""
    return not message.transfer_id and isinstance(message, TransferNote) and message.reason == _PROBE


def _greeting(local: TransferPeer, peer: TransferPeer, reason: str = "") -> bytes:
    """A note about no transfer, of a kind that is never answered: both halves of the protocol ignore it."""
    return encode(TransferNote(NoteKind.CONFIRM, "", local.epoch, peer.epoch, reason))
