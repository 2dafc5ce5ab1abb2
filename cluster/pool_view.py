"""What this router knows of the replicas: who there is, their last reported load, and what it sent them itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.replica_registry import ReplicaTable
from cluster.routing_policy import DecodeCandidate, PrefillCandidate
from replicas.messages import EngineLoad, Frame, TransferPeer


class PoolView:
    """Loads are half a second old at worst (an idle engine sends a frame that often), less our own unheard work."""

    def __init__(self, decodes: Callable[[], ReplicaTable], prefills: Callable[[], ReplicaTable]) -> None:
        self._decodes = decodes
        self._prefills = prefills
        self._load: dict[str, EngineLoad] = {}
        self._agent_names: dict[str, str] = {}
        self._unheard_blocks: Counter[str] = Counter()  # sent to decode, not yet heard admitted
        self._in_flight: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()  # sent to prefill, not yet answered
        self.num_waiting = 0  # our requests that are not admitted, and were sent where they had to wait

    def decode_candidates(self) -> list[DecodeCandidate]:
        return [
            DecodeCandidate(
                replica_id=replica_id,
                total_blocks=metadata["num_blocks"],
                free_blocks=self._free_blocks(replica_id, metadata["num_blocks"]),
                num_in_flight=self._in_flight[replica_id],
                num_queued=self._load[replica_id].num_queued if replica_id in self._load else 0,
            )
            for replica_id, metadata in self._decodes().items()
        ]

    def prefill_candidates(self) -> list[PrefillCandidate]:
        return [
            PrefillCandidate(replica_id, metadata["num_blocks"], self._queued_tokens(replica_id))
            for replica_id, metadata in self._prefills().items()
        ]

    def decode_peer(self, replica_id: str) -> TransferPeer:
        """Raises KeyError when the replica has left."""
        return self._peer(self._decodes(), replica_id)

    def prefill_peer(self, replica_id: str) -> TransferPeer:
        """Raises KeyError when the replica has left."""
        return self._peer(self._prefills(), replica_id)

    def heard(self, frame: Frame) -> None:
        self._load[frame.replica_id] = frame.load

    def heard_prefill(self, replica_id: str, load: EngineLoad) -> None:
        self._load[replica_id] = load

    def sent(self, replica_id: str, blocks: int, must_wait: bool) -> None:
        self._in_flight[replica_id] += 1
        self._unheard_blocks[replica_id] += blocks
        self.num_waiting += must_wait

    def admitted(self, replica_id: str, blocks: int, must_wait: bool) -> None:
        """No longer unheard: the replica's own figures cover it (or it is over). Once for each `sent`."""
        self._unheard_blocks[replica_id] -= blocks
        self.num_waiting -= must_wait
        assert self._unheard_blocks[replica_id] >= 0, "admitted twice"
        assert self.num_waiting >= 0, "admitted twice"

    def ended(self, replica_id: str) -> None:
        """Once for each `sent`, after its `admitted`."""
        self._in_flight[replica_id] -= 1
        assert self._in_flight[replica_id] >= 0, "ended twice"
        if not self._in_flight[replica_id]:
            assert not self._unheard_blocks[replica_id], "ended before admitted"
            del self._in_flight[replica_id], self._unheard_blocks[replica_id]

    def prompt_sent(self, replica_id: str, num_tokens: int) -> None:
        self._prompt_tokens[replica_id] += num_tokens

    def prompt_answered(self, replica_id: str, num_tokens: int) -> None:
        self._prompt_tokens[replica_id] -= num_tokens
        assert self._prompt_tokens[replica_id] >= 0, "answered twice"
        if not self._prompt_tokens[replica_id]:
            del self._prompt_tokens[replica_id]

    def forget(self, replica_id: str) -> str | None:
        """The replica has died. Returns the name of its transfer agent, if it was ever used. Mutates."""
        self._load.pop(replica_id, None)
        return self._agent_names.pop(replica_id, None)

    def _peer(self, table: ReplicaTable, replica_id: str) -> TransferPeer:
        peer = TransferPeer.from_metadata(table[replica_id]["peer"])
        self._agent_names[replica_id] = peer.agent_name
        return peer

    def _free_blocks(self, replica_id: str, total_blocks: int) -> int:
        load = self._load.get(replica_id)
        return (load.free_blocks if load else total_blocks) - self._unheard_blocks[replica_id]

    def _queued_tokens(self, replica_id: str) -> int:
        load = self._load.get(replica_id)
        return max(load.queued_prompt_tokens if load else 0, self._prompt_tokens[replica_id])
