"""Routing to prefill replicas with prefix caches: the shipped router's parts in front of queues, over a recorded trace.

Simulated are the prefill pool (each replica computes prompts one after another at a fixed rate, and keeps the last used
pieces of 256 tokens) and the way between routers and replicas; of decode there is one replica that costs nothing. The
index, the hashing, the pool view and the costs are those of the router itself. So a whole trace takes a minute.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.load.percentile import percentile
from cluster.load.traces import TraceEntry, read_trace
from cluster.policies.routing_policy import Need, PrefillCandidate, Route, RouteKind, RoutingRules
from cluster.routing.key_feed import MAX_PARTS, KeyFeed
from cluster.routing.pairing import choose_prefill
from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_forecast import IndexedForecast, PrefixForecasts, PromptForecast, SentPrompt
from cluster.routing.prompt_keys import PromptKeys
from cluster.simulation.client import prompt_ids_of
from replicas.messages import CallStatus, EngineLoad, PrefillReply
from replicas.recent_part import recent_part
from scheduler.generation_spec import GenerationSpec
from scheduler.prefix_hash import chain_start
from scheduler.recent_keys import PIECE_BLOCKS, PIECE_KEY_BYTES, RecentKeys
from scheduler.sampling_params import SamplingParams

RATE_TOKENS_PER_S = 42_000.0  # Llama-3.1-8B on an H200 (RESULTS.md)
LOAD = 0.70  # of what the replicas could compute if there were no cache
BLOCK_SIZE = 16
_PIECE_TOKENS = BLOCK_SIZE * PIECE_BLOCKS
_CALL_S = 0.001
_TICK_S = 3.0  # of the recording's clock
_RULES = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """has_index: else the least load decides. pulse_s: how often each router asks each replica; None: not at all.
    finds_late: a prompt is looked up when its turn comes, not when it arrives as engines do it. is_spread: arrivals are
    spread over the time that the recording's clock cannot tell (three seconds of Mooncake's); else they come at once.
    """

    name: str
    num_replicas: int
    cache_tokens: int
    num_routers: int = 1
    has_index: bool = True
    pulse_s: float | None = 0.2
    finds_late: bool = False
    is_spread: bool = True


@dataclass(slots=True)
class _Prompt:
    """One request in one run. known: its keys, hashed once for all runs."""

    arrival_s: float
    spec: GenerationSpec
    known: PromptKeys
    router: _Router | None = None
    sent: SentPrompt | None = None
    counted_tokens: int = 0  # by its router, as not yet computed
    done_s: float = 0.0
    num_found: int = 0


class _HashedForecast(IndexedForecast):
    """Of a prompt whose keys are known."""

    known: PromptKeys

    def keys(self, fingerprint: str) -> PromptKeys:
        return self.known


class _Replica:
    """Prompts one after another. What it has of one is found when its turn comes."""

    def __init__(self, name: str, cache_tokens: int, finds_late: bool) -> None:
        self.name, self._num_pieces, self._finds_late = name, cache_tokens // _PIECE_TOKENS, finds_late
        self.log = RecentKeys(f"epoch-{name}")
        self._pieces: dict[int, None] = {}
        self._queue: deque[_Prompt] = deque()
        self.queued_tokens = 0
        self.running: _Prompt | None = None

    def add(self, prompt: _Prompt) -> None:
        self._queue.append(prompt)
        if not self._finds_late:
            self._find(prompt)
        self.queued_tokens += prompt.spec.prompt_len - prompt.num_found

    def _find(self, prompt: _Prompt) -> None:
        num_pieces = len(list(itertools.takewhile(self._pieces.__contains__, prompt.known)))
        for key in reversed(prompt.known.all()[:num_pieces]):
            self._pieces[key] = self._pieces.pop(key)
        prompt.num_found = min(num_pieces * _PIECE_TOKENS, (prompt.spec.prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE)

    def begin(self) -> float | None:
        """Seconds that the next one takes; None: there is none. Mutates."""
        if not self._queue:
            return None
        prompt = self.running = self._queue.popleft()
        if self._finds_late:
            self._find(prompt)
            self.queued_tokens -= prompt.num_found
        return (prompt.spec.prompt_len - prompt.num_found) / RATE_TOKENS_PER_S

    def end(self) -> _Prompt:
        """It is computed, and kept. Mutates."""
        prompt, self.running = self.running, None
        assert prompt is not None
        self.queued_tokens -= prompt.spec.prompt_len - prompt.num_found
        for key in reversed(prompt.known.all()):
            self._pieces.pop(key, None)
            self._pieces[key] = None
        for key in prompt.known:
            self.log.append(key.to_bytes(PIECE_KEY_BYTES, "little"))
        while len(self._pieces) > self._num_pieces:
            del self._pieces[next(iter(self._pieces))]
        return prompt

    def load(self) -> EngineLoad:
        return EngineLoad(0, len(self._queue), self.queued_tokens, 0, 10**6, 0.0, RATE_TOKENS_PER_S)


class _Router:
    def __init__(self, setup: Setup, replicas: dict[str, _Replica], clock: Callable[[], float]) -> None:
        peer = {"fingerprint": "f", "epoch": "", "block_bytes": 1}
        pool = {name: {"num_blocks": setup.cache_tokens // BLOCK_SIZE, "peer": peer} for name in replicas}
        decode = {"decode": {"num_blocks": 10**6, "peer": peer}}
        self.view = PoolView(lambda: decode, lambda: pool, clock)
        self.forecasts = PrefixForecasts(setup.has_index, BLOCK_SIZE, lambda *_: None, clock)
        self.forecasts.present([decode, pool])
        self.feed: KeyFeed | None = self.forecasts.feed("prefill")
        self.decided_s = 0.0
        self.expected_tokens = 0

    def route(self, prompt: _Prompt) -> str:
        """Where it goes. Mutates."""
        began_s = time.thread_time()
        forecast: PromptForecast = PromptForecast()
        if self.forecasts.index is not None:
            forecast = known = _HashedForecast(self.forecasts, self.forecasts.index, prompt.spec)
            known.known = prompt.known
        need = Need(prompt.spec.prompt_len, 1, 1, BLOCK_SIZE, cached=forecast.cached())
        (decode,) = self.view.decode_candidates()
        prefills = self.view.prefill_candidates()
        chosen = choose_prefill(need, prefills, decode, _RULES, pairs=self.view.pairs.of)
        assert isinstance(chosen, PrefillCandidate)
        name = chosen.replica_id
        cached = need.cached_at(name)
        prompt.sent = forecast.sent(Route(RouteKind.REMOTE, "decode", name, False, 1, cached_tokens=cached))
        self.expected_tokens += cached
        prompt.router, prompt.counted_tokens = self, prompt.spec.prompt_len - cached
        self.view.prompt_sent(name, prompt.counted_tokens)
        prompt.sent.tell()
        self.decided_s += time.thread_time() - began_s
        return name

    def answered(self, replica: _Replica, prompt: _Prompt, load: EngineLoad) -> None:
        self.view.prompt_answered(replica.name, prompt.counted_tokens)
        self.view.heard_load(replica.name, load)
        assert prompt.sent is not None
        prompt.sent.prefilled(PrefillReply(CallStatus.OK, "", (), 0.0, 0.0, load, num_cached=prompt.num_found))

    def pulse(self, replica: _Replica) -> None:
        self.view.heard_load(replica.name, replica.load())
        if self.feed is not None:
            for _ in range(MAX_PARTS):
                part = recent_part(replica.log, self.feed.position(replica.name))
                if not self.feed.heard(replica.name, part):
                    break


@dataclass(slots=True)
class _Simulation:
    setup: Setup
    now_s: float = 0.0
    heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (time_s, next(self.count), action))

    def run(self, prompts: Sequence[_Prompt]) -> list[_Router]:
        """Every prompt to its end."""
        names = [f"prefill-{index}" for index in range(self.setup.num_replicas)]
        replicas = {name: _Replica(name, self.setup.cache_tokens, self.setup.finds_late) for name in names}
        routers = [_Router(self.setup, replicas, lambda: self.now_s) for _ in range(self.setup.num_routers)]
        for index, prompt in enumerate(prompts):
            router = routers[index % len(routers)]
            self.at(prompt.arrival_s, lambda prompt=prompt, router=router: self._arrive(prompt, router, replicas))  # type: ignore[misc]
        pulse_s, end_s = self.setup.pulse_s, prompts[-1].arrival_s
        for index, router in enumerate(routers if pulse_s is not None else ()):
            assert pulse_s is not None
            self._pulse(router, replicas, pulse_s * index / len(routers), pulse_s, end_s)
        while self.heap:
            self.now_s, _, action = heapq.heappop(self.heap)
            action()
        return routers

    def _arrive(self, prompt: _Prompt, router: _Router, replicas: dict[str, _Replica]) -> None:
        replica = replicas[router.route(prompt)]

        def take() -> None:
            replica.add(prompt)
            if replica.running is None:
                self._begin(replica)

        self.at(self.now_s + _CALL_S, take)

    def _begin(self, replica: _Replica) -> None:
        seconds = replica.begin()
        if seconds is not None:
            self.at(self.now_s + seconds, lambda: self._end(replica))

    def _end(self, replica: _Replica) -> None:
        prompt = replica.end()
        prompt.done_s = self.now_s + _CALL_S
        load, router = replica.load(), prompt.router
        assert router is not None
        self.at(prompt.done_s, lambda: router.answered(replica, prompt, load))
        self._begin(replica)

    def _pulse(self, router: _Router, replicas: dict[str, _Replica], at_s: float, every_s: float, end_s: float) -> None:
        def ask() -> None:
            for replica in replicas.values():
                router.pulse(replica)
            if self.now_s < end_s:
                self.at(self.now_s + every_s, ask)

        self.at(at_s, ask)


class Trace:
    """All of it, read and hashed once."""

    def __init__(self, path: Path) -> None:
        self._entries = read_trace(path)
        self._specs = [_spec(entry) for entry in self._entries]
        start = chain_start("f")
        self._keys = [PromptKeys(start, spec.prompt_ids, BLOCK_SIZE) for spec in self._specs]
        for keys in self._keys:
            keys.all()

    def prompts(self, num_replicas: int, is_spread: bool) -> list[_Prompt]:
        """As much faster than it was as makes LOAD of it for so many."""
        first_s, last_s = self._entries[0].timestamp_s, self._entries[-1].timestamp_s
        total = sum(spec.prompt_len for spec in self._specs)
        scale = total / (num_replicas * RATE_TOKENS_PER_S * LOAD) / (last_s - first_s)
        rng, tick_s = random.Random(0), _TICK_S if is_spread else 0.0
        prompts = [
            _Prompt((entry.timestamp_s - first_s + rng.random() * tick_s) * scale, spec, keys)
            for entry, spec, keys in zip(self._entries, self._specs, self._keys, strict=True)
        ]
        return sorted(prompts, key=lambda prompt: prompt.arrival_s)


def _spec(entry: TraceEntry) -> GenerationSpec:
    ids = prompt_ids_of(entry.hash_ids, entry.block_tokens, entry.input_len)
    return GenerationSpec(ids, (0,), 1, frozenset(), SamplingParams(temperature=0.0))


def measure(setup: Setup, trace: Trace) -> dict[str, Any]:
    """One row."""
    prompts = trace.prompts(setup.num_replicas, setup.is_spread)
    cpu_s = time.process_time()
    routers = _Simulation(setup).run(prompts)
    total = sum(prompt.spec.prompt_len for prompt in prompts)
    ttft_s = [prompt.done_s - prompt.arrival_s for prompt in prompts]
    return {
        "name": setup.name,
        "replicas": setup.num_replicas,
        "cache_tokens": setup.cache_tokens,
        "routers": setup.num_routers,
        "pulse_s": setup.pulse_s,
        "is_spread": setup.is_spread,
        "expected": sum(router.expected_tokens for router in routers) / total,
        "num_requests": len(prompts),
        "found": sum(prompt.num_found for prompt in prompts) / total,
        "p50_ttft_s": percentile(ttft_s, 50),
        "p90_ttft_s": percentile(ttft_s, 90),
        "p99_ttft_s": percentile(ttft_s, 99),
        "route_us": 1e6 * sum(router.decided_s for router in routers) / len(prompts),
        "cpu_s": time.process_time() - cpu_s,
    }
