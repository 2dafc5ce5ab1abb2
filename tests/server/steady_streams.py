"""A steady load of greedy streams, each compared with what the same prompt gave before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx

from tests.golden.golden_set import Golden
from tests.server.generate import golden_request, stream
from tests.server.processes import wait_until
from tests.server.running_server import RunningServer

_RETRY_S = 0.1  # of a client whose request failed
_PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Ended:
    """One stream. error: why it has not come to its end; wrong: the text it had instead of the expected one."""

    name: str
    began_s: float
    ended_s: float
    error: str | None = None
    wrong: str | None = None


@dataclass(slots=True)
class SteadyStreams:
    """So many clients, each with one stream after another."""

    server: RunningServer
    prompts: list[Golden]
    max_tokens: int
    expected: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    num_near_ties: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)

    def learn(self) -> None:
        """Ask for each prompt once, alone. Fails the test where transformers says otherwise."""
        with self.server.client(120.0) as client:
            for golden in self.prompts:
                (answer,) = stream(client, *golden_request(golden, self.max_tokens))
                golden.check(answer.token_ids)
                self.expected[golden.name], self.texts[golden.name] = answer.token_ids, answer.text

    def run(self, index: int, num_clients: int) -> None:
        """One client, until all are told to stop."""
        turn = index
        while not self._stopping.is_set():
            golden = self.prompts[turn % len(self.prompts)]
            turn += num_clients
            self.ended.append(self._one(golden))
            if self.ended[-1].error is not None:
                self._stopping.wait(_RETRY_S)

    def _one(self, golden: Golden) -> Ended:
        """On a connection of its own: a kept one would hide what happens to new ones."""
        began_s = time.monotonic()
        try:
            with self.server.client(120.0) as client:
                (answer,) = stream(client, *golden_request(golden, self.max_tokens))
        except (httpx.HTTPError, AssertionError) as error:
            return Ended(golden.name, began_s, time.monotonic(), error=f"{type(error).__name__}: {error}"[:300])
        ended = Ended(golden.name, began_s, time.monotonic())
        if (answer.token_ids, answer.text) == (self.expected[golden.name], self.texts[golden.name]):
            return ended
        try:
            is_near_tie = golden.check(answer.token_ids) is not None
        except AssertionError:
            is_near_tie = False
        self.num_near_ties += is_near_tie
        return ended if is_near_tie else replace(ended, wrong=answer.text)

    def stop(self) -> None:
        """No stream begins any more."""
        self._stopping.set()

    @property
    def failed(self) -> list[Ended]:
        return [ended for ended in self.ended if ended.error is not None]

    @property
    def wrong(self) -> list[Ended]:
        return [ended for ended in self.ended if ended.wrong is not None]

    def during(self, moment_s: float) -> list[Ended]:
        """Those that had begun before, and ended after."""
        return [ended for ended in self.ended if ended.began_s < moment_s < ended.ended_s]

    def after(self, moment_s: float) -> list[Ended]:
        """Those that began later."""
        return [ended for ended in self.ended if ended.began_s > moment_s]


@contextmanager
def steady_streams(
    server: RunningServer, prompts: Sequence[Golden], num_clients: int, max_tokens: int
) -> Iterator[SteadyStreams]:
    """Running within, over when it ends. Each client has a stream open all the time."""
    cut = [replace(golden, output_ids=golden.output_ids[:max_tokens]) for golden in prompts]
    streams = SteadyStreams(server, cut, max_tokens)
    streams.learn()
    threads = [threading.Thread(target=streams.run, args=(index, num_clients)) for index in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        streams.stop()
        for thread in threads:
            thread.join(150.0)
    assert not any(thread.is_alive() for thread in threads), "a stream never ended"


@contextmanager
def held_open(
    streams: SteadyStreams, num_clients: int, is_as_wanted: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Within, each client has a stream that is not over, nor all with its client, which may be late to read. They go on
    and are held again until it is as wanted."""
    server = streams.server
    while True:
        server.hold("decode.step")
        try:
            wait_until(lambda: server.total("splitserve_requests_in_flight", pool="decode") == num_clients, _PATIENCE_S)
            if is_as_wanted is None or is_as_wanted():
                yield
                return
        finally:
            server.clear_faults()
        num_ended = len(streams.ended)
        wait_until(lambda before=num_ended: len(streams.ended) > before, _PATIENCE_S)  # type: ignore[misc]
