"""How fast one engine reads from each of its peers: as measured when they met, then as its reads have gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from replicas.kv.kv_transport import MAX_PROBE_BYTES
from replicas.messages import TransferPeer

_SMOOTHING = 0.2
# Time is told by polls, some 0.2 ms apart: of a shorter read it says little, unless that it was fast all the same.
_TELLING_S = 0.005
_FAST_BYTES_PER_S = 10e9
_LONGEST_WINDOW_S = 1.0
# What a pair is first known by. A read of few bytes makes the connection first, or waits for a core: it may take 20 ms
# where others take one, and a pair that is taken for so slow is gone around for minutes. So it says little by itself:
# the fastest of some counts.
_LONG_BYTES = MAX_PROBE_BYTES // 2
_NUM_LOOKS = 3

logger = logging.getLogger(__name__)


class Pace(StrEnum):
    """What a rate is like. UCX tells nobody what it chose."""

    TCP = "tcp"
    NETWORK = "network"  # a fast one, or shared memory
    DEVICE = "device"  # CUDA IPC, NVLink, RDMA

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

    def after(self, num_bytes: int, duration_s: float) -> PairRate:
        """So much was read in this time: a moving average, in which few bytes count little."""
        bytes_per_s = num_bytes / duration_s
        if duration_s < _TELLING_S and bytes_per_s < self.bytes_per_s:
            return self
        weight = _SMOOTHING * min(1.0, num_bytes / MAX_PROBE_BYTES)
        return replace(self, bytes_per_s=self.bytes_per_s + weight * (bytes_per_s - self.bytes_per_s))


@dataclass(slots=True)
class _Window:
    """What has come from a peer since it was quiet, or since the window before."""

    begun_s: float
    num_bytes: int = 0


@dataclass(slots=True)
class _FirstLooks:
    """What reads have told of a peer whose rate is not known: none is faster than the pair is."""

    fastest_bytes_per_s: float = 0.0
    num_long: int = 0  # in time

    def looked(self, num_bytes: int, duration_s: float) -> bool:
        """So much was read in this time: whether that is enough. Mutates."""
        self.fastest_bytes_per_s = max(self.fastest_bytes_per_s, num_bytes / duration_s)
        if num_bytes / duration_s >= _FAST_BYTES_PER_S:
            return True
        if duration_s < _TELLING_S:
            return False
        self.num_long += 1
        return num_bytes >= _LONG_BYTES or self.num_long >= _NUM_LOOKS


class PairRates:
    """One for each transfer thread, which alone changes it; any thread may ask. A peer's first rate is logged."""

    def __init__(self) -> None:
        self._rates: dict[str, PairRate] = {}  # by agent name
        self._windows: dict[str, _Window] = {}
        self._first_looks: dict[str, _FirstLooks] = {}
        self._num_turns = 0

    def of(self, agent_name: str) -> PairRate | None:
        return self._rates.get(agent_name)

    def all(self) -> Mapping[str, PairRate]:
        """By the peers' agent names: a copy."""
        return dict(self._rates)

    def in_turn(self) -> PairRate | None:
        """One after the other, again and again. One thread at most may ask. Mutates."""
        rates = list(self._rates.values())
        self._num_turns += 1
        return rates[self._num_turns % len(rates)] if rates else None

    def slowest(self) -> PairRate | None:
        return min(list(self._rates.values()), key=lambda rate: rate.bytes_per_s, default=None)

    def measured(self, agent_name: str, rate: PairRate, probe_bytes: int = 0) -> None:
        """For the first time: by a probe of so many bytes, or, 0, by reads of KV. Mutates."""
        self._rates[agent_name] = rate
        self._first_looks.pop(agent_name, None)
        extra = {
            "event": "transfer_pair_measured",
            "peer": rate.replica_id,
            "gb_per_s": round(rate.bytes_per_s / 1e9, 3),
            "latency_ms": round(rate.latency_s * 1e3, 3),
            "probe_bytes": probe_bytes,
            "pace": rate.pace,
        }
        logger.info("KV is read from %s at %.3g GB/s", rate.replica_id, rate.bytes_per_s / 1e9, extra=extra)

    def began(self, agent_name: str, is_first: bool, now_s: float) -> None:
        """A read from this peer was posted. is_first: no other is under way. Mutates."""
        if is_first or agent_name not in self._windows:
            self._windows[agent_name] = _Window(now_s)

    def ended(self, peer: TransferPeer, num_bytes: int, is_last: bool, now_s: float) -> None:
        """It is done; is_last: no other is under way. Mutates.

        Reads from one peer share its rate, so what counts is all that has come while it was read from.
        """
        window = self._windows.get(peer.agent_name)
        if window is None:
            return  # it was forgotten meanwhile
        window.num_bytes += num_bytes
        duration_s = now_s - window.begun_s
        if duration_s <= 0.0 or not (is_last or duration_s >= _LONGEST_WINDOW_S):
            return
        self._windows[peer.agent_name] = _Window(now_s)
        known = self._rates.get(peer.agent_name)
        if known is not None:
            self._rates[peer.agent_name] = known.after(window.num_bytes, duration_s)
            return
        looks = self._first_looks.setdefault(peer.agent_name, _FirstLooks())
        if looks.looked(window.num_bytes, duration_s):
            self.measured(peer.agent_name, PairRate(peer.replica_id, looks.fastest_bytes_per_s))

    def forget(self, agent_name: str) -> None:
        """The peer has gone. Mutates; unknown names are fine."""
        self._rates.pop(agent_name, None)
        self._windows.pop(agent_name, None)
        self._first_looks.pop(agent_name, None)
