"""A reader and its sources, turned by hand, over the fake network: time is what the test says it is."""

from __future__ import annotations

from collections.abc import Callable

from replicas.kv.handoff_actions import Event, HandoffTiming
from replicas.kv.kv_transport import KvTransport
from replicas.kv.transfer_driver import TransferDriver
from replicas.messages import Handoff
from scheduler.generated_token import Token
from tests.replicas.fake_transport import FakeNetwork, FakeTransport, NetworkFaults

BLOCK_BYTES = 1 << 16  # as of when a rig is made
NUM_BLOCKS = 48
TIMING = HandoffTiming(lease_s=1.0, resend_s=0.01, max_resend_s=0.05, quarantine_s=0.5, ask_peers_s=5.0)


class Rig:
    """wrap: what the reader's transport is put into. events: the reader's: (time, name, transfer id)."""

    def __init__(
        self,
        faults: NetworkFaults,
        max_bytes_in_flight: int = 1 << 40,
        num_sources: int = 1,
        wrap: Callable[[KvTransport], KvTransport] = lambda transport: transport,
    ) -> None:
        self.time_s = 100.0
        self.network = FakeNetwork(lambda: self.time_s, faults)
        self.events: list[tuple[float, str, str]] = []
        self.reader_pool = bytearray(NUM_BLOCKS * BLOCK_BYTES)
        reader = FakeTransport(self.network, self.reader_pool, BLOCK_BYTES, "decode", "1")
        self.reader = self._driver(wrap(reader), self._note, max_bytes_in_flight)
        self.sources = [self.new_source(f"prefill-{number}", "1") for number in range(num_sources)]

    def new_source(self, replica_id: str, epoch: str) -> TransferDriver:
        pool = bytearray(b"\x07" * NUM_BLOCKS * BLOCK_BYTES)
        return self._driver(FakeTransport(self.network, pool, BLOCK_BYTES, replica_id, epoch), lambda event: None, 1)

    def expect(self, transfer_id: str, source: int = 0, num_blocks: int = 1, after_s: float = 60.0) -> None:
        peer = self.sources[source].local_peer
        self.reader.expect(transfer_id, peer, 4, num_blocks, self.time_s + after_s)

    def hand_over(
        self, transfer_id: str, block_ids: tuple[int, ...], source: int = 0, after_s: float = 60.0, num_kept: int = 0
    ) -> None:
        """Up to the point where the reader has been given its blocks, of the same numbers."""
        self.expect(transfer_id, source, len(block_ids), after_s)
        driver = self.sources[source]
        epochs = (driver.local_peer.epoch, self.reader.local_peer.epoch)
        first = (Token("t", 0, 0, 1, None),)
        handoff = Handoff(transfer_id, *epochs, "fake", block_ids, 4, None, first, 1.0, (), 0, True)
        driver.offer(handoff, self.reader.local_peer, self.time_s + after_s)
        self.run(0.002)
        self.reader.read_into(transfer_id, block_ids, num_kept)

    def run(self, for_s: float, step_s: float = 0.001) -> None:
        """Turn all, every step_s."""
        end_s = self.time_s + for_s
        while self.time_s < end_s:
            self.time_s = min(end_s, self.time_s + step_s)
            for driver in (self.reader, *self.sources):
                driver.advance(driver.collect())

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has landed in the reader's pool."""
        return self.reader_pool.count(0) == len(self.reader_pool)

    def seen(self, transfer_id: str) -> list[str]:
        return [kind for _, kind, of in self.events if of == transfer_id]

    def when(self, kind: str, transfer_id: str) -> float:
        """Seconds since the start."""
        (found,) = (at_s for at_s, *what in self.events if what == [kind, transfer_id])
        return found - 100.0

    def _note(self, event: Event) -> None:
        self.events.append((self.time_s, type(event).__name__, event.transfer_id))

    def _driver(
        self, transport: KvTransport, on_event: Callable[[Event], None], max_bytes_in_flight: int
    ) -> TransferDriver:
        return TransferDriver(transport, on_event, TIMING, max_bytes_in_flight, None, None, lambda: self.time_s)
