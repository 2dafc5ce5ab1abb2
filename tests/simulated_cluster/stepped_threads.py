"""An engine's threads as turns that somebody else takes: nobody blocks, and who would wait says for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any

from replicas.engine.inbox import Inbox
from replicas.kv.handoff_actions import Event, HandoffTiming
from replicas.kv.kv_transport import KvTransport
from replicas.kv.prober import _GIVE_UP_S
from replicas.kv.transfer_driver import TransferDriver
from replicas.kv.transfer_thread import TransferThread

_PROBE_POLL_S = 0.005


class SteppedInbox(Inbox):
    """Nobody blocks: who waits is woken. wait_s: for how long the engine would wait now; None: it goes on at once."""

    def __init__(self, fail: Callable[[str, Exception], None], on_put: Callable[[], None]) -> None:
        super().__init__(fail)
        self._on_put = on_put
        self._num_waiting = 0
        self.wait_s: float | None = None

    def put(self, run: Callable[[], None], request_id: str | None = None) -> None:
        self._num_waiting += 1
        super().put(run, request_id)
        self._on_put()

    def _act(self, action: Any) -> None:
        self._num_waiting -= 1
        super()._act(action)

    def wait(self, longest_s: float) -> None:
        self.wait_s = longest_s

    @property
    def has_any(self) -> bool:
        return self._num_waiting > 0


class _Commands:
    """As a TimedQueue that nobody waits for."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        self._commands: deque[Callable[[], None]] = deque()
        self._on_put = on_put

    def put(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._on_put()

    def get_nowait(self) -> Callable[[], None]:
        if not self._commands:
            raise Empty
        return self._commands.popleft()

    def get(self, timeout_s: float) -> Callable[[], None]:
        return self.get_nowait()

    def empty(self) -> bool:
        return not self._commands


class SteppedTransfers(TransferThread):
    """The transfer thread's turns, one at a time."""

    def __init__(
        self,
        transport: KvTransport,
        on_event: Callable[[Event], None],
        timing: HandoffTiming,
        max_bytes_in_flight: int,
        digest_blocks: Any,
        on_command: Callable[[], None],
    ) -> None:
        super().__init__(lambda: transport, on_event, timing, max_bytes_in_flight, digest_blocks)
        self.driver = self._driver = TransferDriver(
            transport, on_event, timing, max_bytes_in_flight, digest_blocks, None
        )
        self._commands = _Commands(on_command)  # type: ignore[assignment]

    def crank(self) -> None:
        """All that is due now."""
        self._turn(self.driver, 0.0)

    @property
    def due_s(self) -> float:
        """When the next thing is due, if nothing comes and no read ends: both are told, and need not be looked for."""
        driver = self.driver
        prober = driver.peers.prober
        due_s = min(driver.source._next_due_s, driver.reader._next_due_s, driver.peers._next_ask_s)
        if prober._measuring is not None:
            return min(due_s, prober._measuring.begun_s + _GIVE_UP_S)
        if any(not driver.reads.is_open_with(agent_name) for agent_name in prober._waiting):
            return min(due_s, driver._now_s() + _PROBE_POLL_S)
        return due_s
