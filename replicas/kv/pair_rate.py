"""How fast one engine reads from each of its peers: as measured when they met, then as its reads have gone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from replicas.messages import TransferPeer

_SMOOTHING = 0.2
# Time is told by polls, some 0.2 ms apart: of a shorter read it says little, unless that it was fast all the same.
_TELLING_S = 0.005
_FAST_BYTES_PER_S = 10e9


class Pace(StrEnum):
    """What a rate is like. UCX tells nobody what it chose."""

    TCP = "as TCP"
    NETWORK = "as a fast network or shared memory"
    DEVICE = "as CUDA IPC or RDMA"

    @staticmethod
    def of(bytes_per_s: float) -> Pace:
        if bytes_per_s < 1.5e9:
            return Pace.TCP
        return Pace.NETWORK if bytes_per_s < _FAST_BYTES_PER_S else Pace.DEVICE


@dataclass(frozen=True, slots=True)
class PairRate:
    """replica_id: of the peer. latency_s: of the smallest read that was measured; 0.0: none was."""

    replica_id: str
    bytes_per_s: float
    latency_s: float = 0.0

    @property
    def pace(self) -> Pace:
        return Pace.of(self.bytes_per_s)

    def after(self, bytes_per_s: float, duration_s: float) -> PairRate:
        """A read went at this rate: a moving average."""
        if duration_s < _TELLING_S and bytes_per_s < self.bytes_per_s:
            return self
        return replace(self, bytes_per_s=self.bytes_per_s + _SMOOTHING * (bytes_per_s - self.bytes_per_s))


@dataclass(frozen=True, slots=True)
class ReadBegun:
    """delivered_bytes: what had come from the same peer until then."""

    at_s: float
    delivered_bytes: int


class PairRates:
    """One for each transfer thread, which alone changes it; any thread may ask."""

    def __init__(self) -> None:
        self._rates: dict[str, PairRate] = {}  # by agent name
        self._delivered: dict[str, int] = {}

    def of(self, agent_name: str) -> PairRate | None:
        return self._rates.get(agent_name)

    def all(self) -> Mapping[str, PairRate]:
        """By the peers' agent names: a copy."""
        return dict(self._rates)

    def slowest(self) -> PairRate | None:
        return min(list(self._rates.values()), key=lambda rate: rate.bytes_per_s, default=None)

    def measured(self, agent_name: str, rate: PairRate) -> None:
        """By a probe. Mutates."""
        self._rates[agent_name] = rate

    def began(self, agent_name: str, now_s: float) -> ReadBegun:
        """A read from this peer is posted."""
        return ReadBegun(now_s, self._delivered.get(agent_name, 0))

    def ended(self, peer: TransferPeer, num_bytes: int, begun: ReadBegun, now_s: float) -> None:
        """It is done. Mutates.

        Reads from one peer share its rate: what counts is all that has come from it while this one was under way, as
        in the delivery rate of BBR (draft-cheng-iccrg-delivery-rate-estimation).
        """
        delivered = self._delivered.get(peer.agent_name, 0) + num_bytes
        self._delivered[peer.agent_name] = delivered
        duration_s = now_s - begun.at_s
        if duration_s <= 0.0:
            return
        bytes_per_s = (delivered - begun.delivered_bytes) / duration_s
        known = self._rates.get(peer.agent_name)
        if known is not None:
            self._rates[peer.agent_name] = known.after(bytes_per_s, duration_s)
        elif duration_s >= _TELLING_S or bytes_per_s >= _FAST_BYTES_PER_S:
            self._rates[peer.agent_name] = PairRate(peer.replica_id, bytes_per_s)

    def forget(self, agent_name: str) -> None:
        """The peer has gone. Mutates; unknown names are fine."""
        self._rates.pop(agent_name, None)
        self._delivered.pop(agent_name, None)
