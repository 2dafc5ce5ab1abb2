"""The reads of KV of one engine: each peer's in order of arrival, only so many bytes at a time, and how they went.

A transport that gets all at once shares a slow connection among all, and all end late; in order the first end early.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from replicas.channels.wire import encode
from replicas.kv.handoff_actions import StartRead
from replicas.kv.kv_transport import KvTransport, ReadHandle, ReadState
from replicas.kv.pair_rate import PairRates, ReadBegun
from replicas.messages import TransferPeer

_EAGER_S = 0.005  # for so long a read's end is looked for at once: within one card it takes 0.3 ms


@dataclass(slots=True)
class ReadInFlight:
    peer: TransferPeer
    local_block_ids: tuple[int, ...]
    num_bytes: int
    handle: ReadHandle
    begun: ReadBegun
    state: ReadState = ReadState.READING


class TransferReads:
    """For the thread that owns the transport; figures may be read from others. Time is monotonic seconds.

    max_bytes_in_flight: from one peer; a read that is larger goes alone.
    """

    def __init__(self, transport: KvTransport, rates: PairRates, max_bytes_in_flight: int) -> None:
        self._transport, self._rates, self._max_bytes = transport, rates, max_bytes_in_flight
        self._block_bytes = transport.local_peer().block_bytes
        self._waiting: dict[str, OrderedDict[str, StartRead]] = {}  # by agent name, then by transfer id
        self.in_flight: dict[str, ReadInFlight] = {}  # by transfer id
        self.bytes_read = 0
        self.read_s = 0.0

    @property
    def num_waiting(self) -> int:
        """For their turn. Any thread may ask."""
        return sum(len(orders) for orders in list(self._waiting.values()))

    def is_eager(self, now_s: float) -> bool:
        """Whether a read may end any moment."""
        return any(now_s - read.begun.at_s < _EAGER_S for read in self.in_flight.values())

    def is_read_from(self, agent_name: str) -> bool:
        """Whether bytes of this peer may be landing."""
        return any(read.peer.agent_name == agent_name for read in self.in_flight.values())

    # -- their turns -------------------------------------------------------------------------------

    def wait(self, order: StartRead) -> None:
        """Behind those that came before it from the same peer. Mutates."""
        self._waiting.setdefault(order.peer.agent_name, OrderedDict())[order.transfer_id] = order

    def withdraw(self, transfer_id: str) -> bool:
        """Whether this read was waiting; now it is not. Mutates."""
        for agent_name, orders in self._waiting.items():
            if orders.pop(transfer_id, None) is not None:
                if not orders:
                    del self._waiting[agent_name]
                return True
        return False

    def take_due(self, is_given_up: Callable[[str], bool]) -> StartRead | None:
        """The next read whose turn it is; it is to be begun at once. Mutates.

        is_given_up: of a transfer, that its read is not expected to end: nobody waits behind it.
        """
        for agent_name, orders in self._waiting.items():
            order = next(iter(orders.values()))
            ahead_bytes = sum(
                read.num_bytes
                for transfer_id, read in self.in_flight.items()
                if read.peer.agent_name == agent_name
                and read.state is ReadState.READING
                and not is_given_up(transfer_id)
            )
            if not ahead_bytes or ahead_bytes + self._num_bytes(order) <= self._max_bytes:
                self.withdraw(order.transfer_id)
                return order
        return None

    # -- in flight ---------------------------------------------------------------------------------

    def begin(self, order: StartRead, now_s: float) -> None:
        """Post it. Raises what the transport raises; then nothing was posted. Mutates."""
        peer, local = order.peer, order.local_block_ids
        begun = self._rates.began(peer.agent_name, now_s)
        handle = self._transport.start_read(peer, local, order.remote_block_ids, encode(order.done))
        self.in_flight[order.transfer_id] = ReadInFlight(peer, local, self._num_bytes(order), handle, begun)

    def poll(self, transfer_id: str) -> ReadState:
        """Where it stands. Mutates; raises what the transport raises."""
        read = self.in_flight[transfer_id]
        read.state = self._transport.poll_read(read.handle)
        return read.state

    def end(self, transfer_id: str, now_s: float) -> ReadInFlight:
        """It is DONE or FAILED, by its last poll: no more in flight, and its handle is to be released. Mutates."""
        read = self.in_flight.pop(transfer_id)
        if read.state is ReadState.DONE:
            self.bytes_read += read.num_bytes
            self.read_s += now_s - read.begun.at_s
            self._rates.ended(read.peer, read.num_bytes, read.begun, now_s)
        return read

    def _num_bytes(self, order: StartRead) -> int:
        return len(order.local_block_ids) * self._block_bytes
