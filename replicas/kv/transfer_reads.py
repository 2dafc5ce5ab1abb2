"""The reads of KV of one engine: each peer's in order of arrival, only so many bytes at a time, and how they went.

A transport that gets all at once shares a slow connection among all, and all end late; in order the first end early.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from replicas.channels.wire import encode
from replicas.kv.handoff_actions import Action, StartRead
from replicas.kv.handoff_reader import HandoffReader
from replicas.kv.kv_transport import KvTransport, ReadHandle, ReadState
from replicas.kv.pair_rate import PairRates
from replicas.messages import TransferPeer

_EAGER_S = 0.005  # for so long a read's end is looked for at once: within one card it takes 0.3 ms


@dataclass(slots=True)
class ReadInFlight:
    peer: TransferPeer
    local_block_ids: tuple[int, ...]
    num_bytes: int
    handle: ReadHandle
    begun_s: float
    state: ReadState = ReadState.READING


class TransferReads:
    """For the thread that owns the transport; figures may be read from others. Time is monotonic seconds.

    max_bytes_in_flight: from one peer; a read that is larger goes alone. on_failed: hears why one could not be posted.
    """

    def __init__(
        self,
        transport: KvTransport,
        reader: HandoffReader,
        rates: PairRates,
        max_bytes_in_flight: int,
        on_failed: Callable[[str], None],
    ) -> None:
        self._transport, self._reader, self._rates = transport, reader, rates
        self._max_bytes, self._on_failed = max_bytes_in_flight, on_failed
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
        return any(now_s - read.begun_s < _EAGER_S for read in self.in_flight.values())

    def is_open_with(self, agent_name: str) -> bool:
        """Whether bytes of this peer may be landing."""
        return any(read.peer.agent_name == agent_name for read in self.in_flight.values())

    # -- their turns -------------------------------------------------------------------------------

    def add(self, order: StartRead) -> None:
        """Behind those that came before it from the same peer. Mutates."""
        self._waiting.setdefault(order.peer.agent_name, OrderedDict())[order.transfer_id] = order

    def withdraw(self, transfer_id: str, now_s: float) -> list[Action]:
        """This transfer has ended: if it is still waiting, nothing will land in its blocks. Mutates."""
        if any(transfer_id in orders for orders in self._waiting.values()):
            self._take(transfer_id)
            return self._reader.read_ended(transfer_id, False, "", now_s)
        return []

    def begin_due(self, now_s: float) -> list[Action]:
        """Post all whose turn it is. What follows of those that can't be posted. Mutates."""
        actions: list[Action] = []
        for agent_name in list(self._waiting):
            ahead_bytes = self._bytes_ahead(agent_name, now_s)
            while (order := self._first(agent_name)) is not None:
                num_bytes = self._num_bytes(order)
                if ahead_bytes and ahead_bytes + num_bytes > self._max_bytes:
                    break
                self._take(order.transfer_id)
                if not self._reader.is_open(order.transfer_id):  # it ended while a test held this
                    actions += self._reader.read_ended(order.transfer_id, False, "", now_s)
                    continue
                failures = self._begin(order, ahead_bytes == 0, now_s)
                actions += failures
                ahead_bytes += 0 if failures else num_bytes
        return actions

    def _begin(self, order: StartRead, is_first: bool, now_s: float) -> list[Action]:
        peer, local = order.peer, order.local_block_ids
        try:
            handle = self._transport.start_read(peer, local, order.remote_block_ids, encode(order.note))
        except Exception as error:
            self._on_failed(f"read of {order.transfer_id}: {error}")
            return self._reader.read_ended(order.transfer_id, False, str(error), now_s)
        self.in_flight[order.transfer_id] = ReadInFlight(peer, local, self._num_bytes(order), handle, now_s)
        self._rates.began(peer.agent_name, is_first, now_s)
        return []

    def _bytes_ahead(self, agent_name: str, now_s: float) -> int:
        """Under way from this peer. Not those that are expected to end no more: nobody waits behind them."""
        return sum(
            read.num_bytes
            for transfer_id, read in self.in_flight.items()
            if read.peer.agent_name == agent_name
            and read.state is ReadState.READING
            and not self._reader.is_quarantined(transfer_id, now_s)
        )

    def _first(self, agent_name: str) -> StartRead | None:
        return next(iter(self._waiting.get(agent_name, {}).values()), None)

    def _take(self, transfer_id: str) -> None:
        agent_name = next(name for name, orders in self._waiting.items() if transfer_id in orders)
        del self._waiting[agent_name][transfer_id]
        if not self._waiting[agent_name]:
            del self._waiting[agent_name]

    # -- in flight ---------------------------------------------------------------------------------

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
            self.read_s += now_s - read.begun_s
            is_last = not self._bytes_ahead(read.peer.agent_name, now_s)
            self._rates.ended(read.peer, read.num_bytes, is_last, now_s)
        return read

    def _num_bytes(self, order: StartRead) -> int:
        return len(order.local_block_ids) * self._block_bytes
