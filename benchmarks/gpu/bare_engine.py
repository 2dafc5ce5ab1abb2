"""A decode engine without Ray, channel and transfers: what is left is scheduler, runner and the engine's loop."""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.bare_drafts import Drafts
from replicas.engine.constrained_rows import Grammars
from replicas.engine.engine import Engine
from replicas.engine.engine_parts import EngineParts
from replicas.engine.token_frames import TokenFrames
from replicas.engine.two_lane_engine import TwoLaneEngine
from replicas.fault_points import FaultPoints
from replicas.kv.kv_pool import KvPool
from replicas.messages import CallStatus, GenerateCall, GenerateReply, GenerationSpec, Token
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.metrics.pool_metrics import PoolMetrics
from replicas.model.layer_check import check_layers
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel
from replicas.pool_size import chunk_multiple
from replicas.serving.device_runner import make_runner
from replicas.serving.grammars_opening import GrammarsOpening
from replicas.settings import GrammarSettings, ModelSettings
from scheduler.admission import AdmissionPolicy
from scheduler.capabilities import DECODE
from scheduler.grammar import Grammar
from scheduler.lane_split import LaneObjectives
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixOptions
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler


@dataclass(slots=True)
class TimedTokens:
    """Tokens of one request and when the engine handed each out."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class RecordingSender:
    """Stands for the token channel: keeps what a router would have been sent. Called by the engine thread."""

    public_key = b""
    has_unsent = False

    def __init__(self) -> None:
        self.streams: dict[str, TimedTokens] = {}

    def open(self, channel: Any) -> None: ...

    def send(
        self,
        router_id: str,
        load: Any,
        admitted: Sequence[str],
        tokens: Sequence[Token],
        prompts: Any = (),
        cached: Any = (),
        drafted: Any = (),
    ) -> None:
        now_s = time.perf_counter()
        for item in tokens:
            stream = self.streams[item.request_id]
            stream.tokens.append(item.token_id)
            stream.times_s.append(now_s)

    def flush(self) -> None: ...

    def close(self, router_id: str) -> None: ...

    def stalled_routers(self, now_s: float) -> tuple[str, ...]:
        return ()

    def shut_down(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineSize:
    """capacity_tokens: of the KV pool; None: nine tenths of what memory is free after the weights (a card's)."""

    max_sequences: int
    max_model_len: int
    max_step_tokens: int
    capacity_tokens: int | None = None
    num_host_blocks: int = 0
    quantile: float | None = None
    block_size: int = 16
    device: str = "cuda"  # or cpu, to try a benchmark where there is no card


@dataclass(frozen=True, slots=True)
class FewBits:
    """As `model.quantise` and `kv.dtype` of the config."""

    quantise: str = "none"
    kv_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class LoadMemory:
    """Of a card, in bytes, once a model is loaded: what it takes, and the most that it took meanwhile. 0 on a CPU."""

    weights_bytes: int
    peak_bytes: int

    @staticmethod
    def now(device: torch.device) -> LoadMemory:
        if device.type != "cuda":
            return LoadMemory(0, 0)
        return LoadMemory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


class BareEngine:
    """A context: the engine runs within it."""

    def __init__(
        self,
        folder: str,
        dtype: str,
        load_format: str,
        size: EngineSize,
        lag: int = 1,
        sender: RecordingSender | None = None,
        lanes: LaneObjectives | None = None,
        grammars: GrammarSettings | None = None,
        prefixes: PrefixOptions | None = None,
        bits: FewBits | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """Loads, checks and warms up; blocks for seconds to minutes. start_s: how long that took. lanes: it has two.
        grammars: it can hold texts against some; the folder has a tokenizer. prefixes: it has a prefix cache. bits:
        what is quantised; then a check that fails is only noted, in `failed_check`: times of random weights tell all
        the same. drafts: its rows may have some."""
        started_s = time.perf_counter()
        device = torch.device(size.device)
        few = bits or FewBits()
        model = ModelSettings(
            folder, "/tmp/splitserve-cache", dtype, size.max_model_len, load_format, False, few.quantise
        )
        loaded = load_model(model, device, few.kv_dtype)
        self.model: torch.nn.Module = loaded.model
        _wait_for(device)
        self.load_s = time.perf_counter() - started_s
        self.memory = LoadMemory.now(device)
        layout = loaded.kv_layout(size.block_size, few.kv_dtype)
        head = drafts.make_head(loaded) if drafts and drafts.make_head else None
        layout = layout if head is None else replace(layout, num_extra_layers=1)
        if size.capacity_tokens is not None:
            capacity_bytes = size.capacity_tokens * layout.bytes_per_token
        else:
            capacity_bytes = int(0.9 * torch.cuda.mem_get_info()[0])
        pool = KvPool(layout, capacity_bytes // layout.block_bytes, device)
        self.runner: ModelRunner = make_runner(
            loaded, pool, size.max_sequences, size.max_model_len, size.num_host_blocks, lanes is not None,
            make_drafter=drafts.make_drafter if drafts else None, head=head,
            card_drafting=drafts.on_card(pool, head) if drafts else None,
        )  # fmt: skip
        self.failed_check = ""
        try:
            check_layers(loaded.model, loaded.dtype)
            self.self_check_difference = self_check(self.runner, loaded)
        except UnsupportedModel as error:
            if bits is None:
                raise
            self.self_check_difference, self.failed_check = float("nan"), str(error)
        self.runner.warm_up()
        for share in self.runner.shares:
            self_check(self.runner.beside(share), loaded)
        _wait_for(device)
        self.start_s = time.perf_counter() - started_s
        self.grammars: Grammars | None = None
        if grammars is not None:
            opening = GrammarsOpening(model, grammars, size.device, loaded.vocab_size)
            self.grammars = opening.result(lambda duration_s: None)
        self._size, self._lag, self._lanes, self._num_blocks = size, lag, lanes, pool.num_blocks
        self._assemble(sender or RecordingSender(), prefixes, drafts)

    def _assemble(self, sender: RecordingSender, prefixes: PrefixOptions | None, drafts: Drafts | None) -> None:
        """Scheduler and engine around the runner. Mutates."""
        size, lanes = self._size, self._lanes
        of_size = size.block_size, size.max_sequences, size.max_step_tokens
        limits = PoolLimits(self._num_blocks, *of_size, chunk_multiple=chunk_multiple(size.device))
        policy = AdmissionPolicy(quantile=size.quantile)
        self.scheduler = Scheduler(
            limits, DECODE, policy, self._lag, size.num_host_blocks, lanes is not None, prefixes,
            drafts.speculation(self.runner) if drafts else None,
        )  # fmt: skip
        parts = EngineParts(
            self.scheduler,
            self.runner,
            FaultPoints(None, self.runner.pool.tensor),
            EngineMetrics(PoolMetrics("benchmark", "decode", "0", "0", engine=size.device, backend="none")),
            4,
            objectives=lanes or LaneObjectives(),
            grammars=self.grammars,
        )
        self.sender = sender
        frames = TokenFrames(self.sender, idle_frame_s=3600.0)  # type: ignore[arg-type]
        kind = Engine if lanes is None else TwoLaneEngine
        self.engine = kind("decode", parts, frames)

    def beside(self, prefixes: PrefixOptions | None, drafts: Drafts | None = None) -> BareEngine:
        """Another engine over the same runner and KV memory, to be compared with this one. Both may be entered, but
        only one computes at a time, and what the other has cached is then no longer what it was. drafts: of a runner
        that makes them."""
        other = copy(self)
        other._assemble(RecordingSender(), prefixes, drafts)
        return other

    def __enter__(self) -> BareEngine:
        gc.collect()
        gc.freeze()  # as a replica does
        self.engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop()
        gc.unfreeze()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        sampling: SamplingParams,
        grammar: Grammar | None = None,
    ) -> list[TimedTokens]:
        """All at once, each to its end. Blocks. Raises RuntimeError when one fails. grammar: held by all."""
        specs = {
            uuid.uuid4().hex: GenerationSpec(tuple(prompt), (0,), limit, frozenset(), sampling, grammar=grammar)
            for prompt, limit in zip(prompts, max_tokens, strict=True)
        }
        for request_id in specs:
            self.sender.streams[request_id] = TimedTokens()
        self.run_specs(specs)
        return [self.sender.streams.pop(request_id) for request_id in specs]

    def run_specs(self, specs: Mapping[str, GenerationSpec]) -> None:
        """All at once, each to its end; what they generate goes to the sender. Blocks. Raises RuntimeError.

        specs: by request id.
        """
        channel: Any = SimpleNamespace(router_id="benchmark")
        futures: list[Future[GenerateReply]] = [
            self.engine.generate(GenerateCall(request_id, spec, 600.0, channel, source=None))
            for request_id, spec in specs.items()
        ]
        for future in futures:
            reply = future.result(timeout=600)
            if reply.status is not CallStatus.OK:
                raise RuntimeError(f"{reply.status}: {reply.detail}")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def steady_step_ms(streams: list[TimedTokens]) -> float:
    """Mean time of a step while every stream was decoding: after the last first token, until the first end."""
    start_s = max(stream.times_s[0] for stream in streams)
    end_s = min(stream.times_s[-1] for stream in streams)
    times_s = [t for t in streams[0].times_s if start_s < t <= end_s]
    if len(times_s) < 10:
        raise ValueError(f"only {len(times_s)} steps with every stream decoding: more max_tokens are needed")
    return 1000 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)
