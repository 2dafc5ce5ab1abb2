"""A load of streams that are compared one by one: each client has one open all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.chaos.asked import Asked
from tests.chaos.chaos_client import HANGS_AFTER_S, Stream, read_stream
from tests.chaos.judge import Undisturbed

_RETRY_S = 0.5  # of a client whose request failed
_ALONE = 4  # at a time, when the undisturbed texts are learnt


def learn_undisturbed(url: str, all_asked: Sequence[Asked]) -> Undisturbed:
    """Ask for each once, with nothing else going on. Blocks for a minute."""
    undisturbed = Undisturbed()
    with ThreadPoolExecutor(_ALONE) as pool:
        for stream in pool.map(lambda asked: read_stream(url, asked), all_asked):
            undisturbed.learn(stream)
    return undisturbed


@dataclass(slots=True)
class GoldenLoad:
    """So many clients, each with its own request, one stream after another."""

    url: str
    all_asked: Sequence[Asked]
    streams: list[Stream] = field(default_factory=list)  # in the order of their ends
    open: dict[str, float] = field(default_factory=dict)  # since when each client has had its stream
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, asked: Asked) -> None:
        """One client, until all are told to stop."""
        turn = 0
        while not self._stopping.is_set():
            # Two of three prompts are computed and moved; of the others the prefix cache has all but the last block.
            salt = None if turn % 3 == 2 else f"{asked.name} {turn}"
            turn += 1
            self.open[asked.name] = time.monotonic()
            self.streams.append(stream := read_stream(self.url, asked, salt))
            if stream.error is not None:
                self._stopping.wait(_RETRY_S)
        self.open.pop(asked.name, None)

    def stop(self) -> None:
        """No stream begins any more."""
        self._stopping.set()

    def during(self, moment_s: float) -> list[Stream]:
        """Those that had begun before, and ended after."""
        return [stream for stream in self.streams if stream.began_s < moment_s < stream.ended_s]

    def whole_since(self, moment_s: float) -> set[str]:
        """Clients of which a stream that began later has come to its end."""
        return {stream.asked.name for stream in self.streams if stream.began_s > moment_s and stream.is_whole}


@contextmanager
def golden_load(url: str, all_asked: Sequence[Asked]) -> Iterator[GoldenLoad]:
    """Running within; when it ends, all streams have."""
    load = GoldenLoad(url, all_asked)
    threads = [threading.Thread(target=load.run, args=(asked,), daemon=True) for asked in all_asked]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        deadline_s = time.monotonic() + 2 * HANGS_AFTER_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"streams that never end: {load.open}"
