"""All that decides a run: the same options and seed send the same requests at the same times, from any number of
client processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.load.arrivals import Arrival, constant_arrivals, gamma_arrivals, poisson_arrivals, trace_arrivals
from cluster.load.client import OutgoingRequest, Target
from cluster.load.length_range import LengthRange
from cluster.load.traces import TraceEntry, read_trace
from cluster.load.workload import PromptMaker, Shape, synthetic_shapes


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """A recorded workload, and how it is made to fit the server (TraceEntry.scaled)."""

    path: Path
    length_scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None

    def entries(self, num_requests: int | None) -> list[TraceEntry]:
        entries = read_trace(self.path, num_requests)
        return [entry.scaled(self.length_scale, self.max_input_len, self.max_output_len) for entry in entries]


_INPUTS, _OUTPUTS = LengthRange(128, 128), LengthRange(64, 64)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """rate_per_s None: a trace as it was recorded. num_requests None: all of a trace.

    prompt: "ids" or "text". body: further fields of every request.
    """

    target: Target
    arrival: Arrival = Arrival.POISSON
    rate_per_s: float | None = 1.0
    burstiness: float = 1.0
    num_requests: int | None = 100
    inputs: LengthRange = _INPUTS
    outputs: LengthRange = _OUTPUTS
    trace: TraceOptions | None = None
    prompt: str = "ids"
    token_ids: tuple[int, int] = (1_000, 30_000)
    stream: bool = True
    seed: int = 0
    num_processes: int = 1
    num_warmup: int = 0
    timeout_s: float = 600.0
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.arrival is Arrival.TRACE and self.trace is None:
            raise ValueError("arrivals of a trace need a trace")
        if self.trace is None and self.num_requests is None:
            raise ValueError("without a trace the number of requests must be given")
        if self.arrival is not Arrival.TRACE and self.rate_per_s is None:
            raise ValueError("a rate is needed")
        if self.target.endpoint == "chat" and self.prompt == "ids":
            raise ValueError("a chat takes text, no token ids")

    def requests(self, process: int = 0, num_processes: int = 1) -> list[OutgoingRequest]:
        """One process's share, every num_processes-th request. Reads the trace; takes long for a large one."""
        times_s, shapes = self.schedule()
        maker = PromptMaker(self.seed, *self.token_ids)
        share = range(process, len(shapes), num_processes)
        return [self._request(maker, index, times_s[index], shapes[index]) for index in share]

    def warmup_requests(self) -> Iterator[OutgoingRequest]:
        """Requests of the same shapes as the first ones, with prompts of their own."""
        _, shapes = self.schedule()
        maker = PromptMaker(self.seed + 1, *self.token_ids)
        for index in range(self.num_warmup):
            shape = shapes[index % len(shapes)]
            yield self._request(maker, index, 0.0, Shape(shape.input_len, shape.output_len))

    def schedule(self) -> tuple[list[float], list[Shape]]:
        """(seconds from the start, shape) of every request. Raises ValueError and, for the trace, OSError."""
        entries = self.trace.entries(self.num_requests) if self.trace else None
        if entries is not None:
            shapes = [Shape.of(entry) for entry in sorted(entries, key=lambda entry: entry.timestamp_s)]
        else:
            assert self.num_requests is not None, "checked above"
            shapes = synthetic_shapes(self.num_requests, self.inputs, self.outputs, self.seed)
        if self.arrival is Arrival.TRACE:
            assert entries is not None, "checked above"
            return trace_arrivals([entry.timestamp_s for entry in entries], self.rate_per_s), shapes
        assert self.rate_per_s is not None, "checked above"
        match self.arrival:
            case Arrival.CONSTANT:
                return constant_arrivals(self.rate_per_s, len(shapes)), shapes
            case Arrival.GAMMA:
                return gamma_arrivals(self.rate_per_s, self.burstiness, len(shapes), self.seed), shapes
            case _:
                return poisson_arrivals(self.rate_per_s, len(shapes), self.seed), shapes

    def _request(self, maker: PromptMaker, index: int, time_s: float, shape: Shape) -> OutgoingRequest:
        prompt = maker.token_ids(index, shape) if self.prompt == "ids" else maker.text(index, shape)
        return OutgoingRequest(index, time_s, prompt, shape.input_len, shape.output_len, self.stream, self.body)
