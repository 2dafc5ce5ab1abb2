"""The one thread of an engine that moves KV: it owns the transport and both halves of the handoff protocol.

The engine's threads only put commands into its queue, and get events through a callback. Nothing that goes wrong
here reaches the step loop, and nothing short of a bug in the loop itself stops the thread: watch is_alive and
last_poll_s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty

from replicas.kv.block_digests import DigestBlocks
from replicas.kv.handoff_actions import Event, HandoffTiming
from replicas.kv.kv_transport import KvTransport
from replicas.kv.pair_rate import PairRate
from replicas.kv.transfer_driver import TransferDriver
from replicas.kv.transfer_faults import TransferFaults
from replicas.messages import Handoff, MovedChoice, Token, TransferPeer
from replicas.timed_queue import TimedQueue

_EAGER_POLL_S = 0.0001  # while a read may end any moment
_BUSY_POLL_S = 0.001  # while a transfer is open on either side
_IDLE_POLL_S = 0.02  # nothing is expected, but a peer may ask again, and UCX tells nobody

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferSnapshot:
    """Counters since the start, and gauges, for metrics. Seconds; last_poll_s is on time.monotonic()."""

    results: dict[str, int]  # "ready", "lost: <LossReason>", "source: <SourceOutcome>"
    errors: dict[str, int]  # as `pool_metrics.TRANSFER_ERRORS`
    bytes_read: int
    busy_s: float  # spent working, not waiting
    read_s: float  # summed over reads that succeeded, from post to end
    leases_open: int
    reads_expected: int
    reads_waiting: int  # for their turn
    reads_in_flight: int
    reads_quarantined: int
    peers_loaded: int
    rates: Mapping[str, PairRate]  # by the peer's agent name
    last_poll_s: float


class TransferThread:
    """Moves KV for one engine. Commands may be given from any thread; they do not block, and answer by events:

    every check_reader by one ReaderChecked; every accepted offer ends, with all its parts, in one SourceReleased; every
    expect in one KvReady or KvLost; every accepted read_into in one ReadReleased (or none, if a read never ends). What
    was impossible is a CommandRefused.

    make_transport: called on the new thread, the only one that touches the transport (a CUDA caller sets the
    device there). on_event: called on the transfer thread; must be quick and must not wait for this thread.
    max_bytes_in_flight: as `TransferReads`. digest_blocks: of this engine's blocks; None: no verification,
    neither given nor asked for.
    """

    def __init__(
        self,
        make_transport: Callable[[], KvTransport],
        on_event: Callable[[Event], None],
        timing: HandoffTiming,
        max_bytes_in_flight: int,
        digest_blocks: DigestBlocks | None = None,
        faults: TransferFaults | None = None,
    ) -> None:
        self._make_driver: Callable[[], TransferDriver] = lambda: TransferDriver(
            make_transport(), on_event, timing, max_bytes_in_flight, digest_blocks, faults
        )
        self._timing = timing
        self._commands: TimedQueue[Callable[[], None]] = TimedQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._started = threading.Event()
        self._stop_by_s: float | None = None
        self._start_error: Exception | None = None
        self._driver: TransferDriver | None = None
        self._busy_s = 0.0
        self.last_poll_s = time.monotonic()

    def start(self, timeout_s: float = 120.0) -> TransferPeer:
        """Start, and block until the transport stands. Returns this engine's end of transfers.

        Raises what make_transport raised, or TimeoutError.
        """
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise TimeoutError(f"the KV transport did not start within {timeout_s} s")
        if self._start_error is not None:
            raise self._start_error
        return self._running().local_peer

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Cancel everything open, wait for reads in flight, close the transport. Blocks up to about timeout_s.

        False: a read is still in flight, or the thread hangs; the pool's memory must then stay where it is.
        """
        if self._thread.ident is None:
            return True
        self._stop_by_s = time.monotonic() + timeout_s
        self._commands.put(lambda: None)
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive() and not (self._driver is not None and self._driver.num_landing)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def thread(self) -> threading.Thread:
        """The one that moves KV; for those that watch it."""
        return self._thread

    # -- commands ------------------------------------------------------------------------------------------------

    def check_reader(self, transfer_id: str, reader: TransferPeer) -> None:
        """Find out whether this reader can be reached, while what it will read is still being computed."""
        self._commands.put(partial(self._running().check_reader, transfer_id, reader))

    def offer(
        self,
        transfer_id: str,
        reader: TransferPeer,
        block_ids: Sequence[int],
        prompt_len: int,
        first_tokens: Sequence[Token],
        deadline_s: float,
        candidates: Sequence[tuple[int, float]] = (),
        first_block: int = 0,
        is_last: bool = True,
        moved: Sequence[MovedChoice] = (),
    ) -> None:
        """Hand over these blocks, whose KV is written and visible to the device that reads. They must not change
        until SourceReleased. deadline_s: when the request ends, on time.monotonic(). moved: of a request that was
        decoded here.

        They may be a part of the prompt's, from first_block on: the next one goes on where it ends, and the last one
        has the first tokens.
        """
        driver = self._running()
        handoff = Handoff(
            transfer_id=transfer_id,
            source_epoch=driver.local_peer.epoch,
            reader_epoch=reader.epoch,
            fingerprint=driver.local_peer.fingerprint,
            block_ids=tuple(block_ids),
            prompt_len=prompt_len,
            digests=None,
            first_tokens=tuple(first_tokens),
            lease_s=self._timing.lease_s,
            candidates=tuple(candidates),
            first_block=first_block,
            is_last=is_last,
            moved=tuple(moved),
        )
        self._commands.put(partial(driver.offer, handoff, reader, deadline_s))

    def expect(
        self, transfer_id: str, source: TransferPeer, prompt_len: int, num_blocks: int | None, deadline_s: float
    ) -> None:
        """Wait for a handoff from this source. Give this before anybody tells the source to prefill, or to stop.

        num_blocks: as `HandoffReader.expect`. deadline_s: when the request ends, on time.monotonic().
        """
        self._commands.put(partial(self._running().expect, transfer_id, source, prompt_len, num_blocks, deadline_s))

    def read_into(self, transfer_id: str, block_ids: Sequence[int], num_kept: int) -> None:
        """Answer to HandoffArrived: this engine's blocks for the whole prompt, in its order.

        The first num_kept hold their part of the prompt's KV already: only the others are read and verified, and they
        belong to the transfer too, until ReadReleased. All may be kept: the handoff then ends without a read.
        """
        self._commands.put(partial(self._running().read_into, transfer_id, tuple(block_ids), num_kept))

    def cancel(self, transfer_id: str) -> None:
        """End this transfer, whichever half of it is here. Nothing when it has ended."""
        self._commands.put(partial(self._running().cancel, transfer_id))

    def forget_peer(self, agent_name: str) -> None:
        """This peer is confirmed dead: end its transfers, unload it."""
        self._commands.put(partial(self._running().forget_peer, agent_name))

    def snapshot(self) -> TransferSnapshot:
        """Does not block; its values may be a poll apart from each other. RuntimeError before start()."""
        driver = self._running()
        return TransferSnapshot(
            results=dict(driver.results),
            errors=dict(driver.errors),
            bytes_read=driver.reads.bytes_read,
            busy_s=self._busy_s,
            read_s=driver.reads.read_s,
            leases_open=driver.source.num_open,
            reads_expected=driver.reader.num_open,
            reads_waiting=driver.reads.num_waiting,
            reads_in_flight=len(driver.reads.in_flight),
            reads_quarantined=driver.reader.num_quarantined(time.monotonic()),
            peers_loaded=len(driver.peers),
            rates=driver.peers.rates.all(),
            last_poll_s=self.last_poll_s,
        )

    def slowest_pair(self) -> PairRate | None:
        """The peer from which KV is read slowest, of those measured. Does not block; None before start()."""
        return self._driver.peers.rates.slowest() if self._driver is not None else None

    def pair_in_turn(self) -> PairRate | None:
        """One of the peers that were measured, each in its turn. As slowest_pair; for one thread."""
        return self._driver.peers.rates.in_turn() if self._driver is not None else None

    # -- the thread ----------------------------------------------------------------------------------------------

    def _running(self) -> TransferDriver:
        if self._driver is None:
            raise RuntimeError("the transfer thread is not started")
        return self._driver

    def _run(self) -> None:
        try:
            driver = self._driver = self._make_driver()
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            while self._stop_by_s is None:
                self._turn(driver, _pause_s(driver))
            self._wind_up(driver, self._stop_by_s)
        except BaseException:
            logger.critical("the transfer thread died; no KV moves any more", exc_info=True)
            raise

    def _turn(self, driver: TransferDriver, wait_s: float) -> None:
        """Wait for a command, at most wait_s; then do all that is due."""
        commands: list[Callable[[], None]] = []
        with suppress(Empty):
            commands.append(self._commands.get(wait_s))
        self.last_poll_s = time.monotonic()
        mail = driver.collect()  # before the commands are taken: see there
        with suppress(Empty):
            while True:
                commands.append(self._commands.get_nowait())
        for command in commands:
            try:
                command()
            except Exception:
                logger.exception("a KV transfer command failed")
        driver.advance(mail)
        self._busy_s += time.monotonic() - self.last_poll_s

    def _wind_up(self, driver: TransferDriver, stop_by_s: float) -> None:
        driver.cancel_all()
        self._turn(driver, _BUSY_POLL_S)
        while driver.num_landing and time.monotonic() < stop_by_s:
            self._turn(driver, _BUSY_POLL_S)
        if driver.num_landing:
            logger.error("%d KV reads never ended; the transport stays open", driver.num_landing)
        else:
            driver.close()


def _pause_s(driver: TransferDriver) -> float:
    """Until the next poll."""
    if driver.is_eager:
        return _EAGER_POLL_S
    return _BUSY_POLL_S if driver.is_busy else _IDLE_POLL_S
