"""SIGTERM to a Serve replica: it drains instead of ending at once.

Ray's worker loop answers SIGTERM with the end of the process. A signal handler can only be set by the main thread,
which is Ray's, so what that handler calls is replaced: `ray._private.worker` looks it up by name each time. Ray is
pinned, and tests/server/test_drain.py covers this.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_EXIT_NAME = "raise_sys_exit_with_custom_error_message"


class Termination:
    """Whether this process was told to go. Serve learns it by the health check, and drains and replaces the replica."""

    def __init__(
        self,
        drain_timeout_s: float,
        end_process: Callable[[int], object] = os._exit,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        """end_process: called when the time is up though Serve has not ended the replica meanwhile. on_request: called
        when the drain begins; does not block."""
        self._drain_timeout_s, self._end_process, self._on_request = drain_timeout_s, end_process, on_request
        self._requested = threading.Event()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def check(self) -> None:
        """Raises ReplicaTerminating once SIGTERM has come: for a health check."""
        if self.is_requested:
            raise ReplicaTerminating("SIGTERM: this replica ends what it has begun, and takes nothing new")

    def watch(self) -> None:
        """From now on the first SIGTERM begins a drain; a second one ends the process."""
        from ray._private import worker

        self.install(worker)

    def install(self, ray_worker: Any) -> None:
        """Likewise; ray_worker: the module whose handler calls the exit function by its name."""
        exit_now: Callable[..., object] | None = getattr(ray_worker, _EXIT_NAME, None)
        if exit_now is None:
            logger.warning("Ray has changed: SIGTERM ends this replica without a drain", extra={"event": "no_drain"})
            return

        def begin_drain(*arguments: Any, **options: Any) -> None:
            if self.is_requested:
                exit_now(*arguments, **options)
            self.request()

        setattr(ray_worker, _EXIT_NAME, begin_drain)

    def request(self) -> None:
        """As if SIGTERM had come."""
        logger.warning("SIGTERM: draining", extra={"event": "drain_begun", "drain_timeout_s": self._drain_timeout_s})
        self._requested.set()
        self._on_request()
        timer = threading.Timer(self._drain_timeout_s, self._end_process, (1,))
        timer.daemon = True
        timer.start()


class ReplicaTerminating(Exception):
    """Ray Serve replaces the replica."""
