"""`python -m benchmarks.simulation.prefix_replay`: what prefix caches find of a recorded trace, asked three ways.

The first requests of Mooncake's conversations, lengths divided by 16, one after another on one replica: by a reference
of thirty lines, by the simulator, and with --engine by a real engine on the CPU (a tiny Llama with random weights). All
see the same token ids.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.simulation.h100_system import MOONCAKE_CONVERSATION, h100_costs
from benchmarks.simulation.lru_reference import LruReference
from cluster.load.tables import table
from cluster.load.traces import read_trace
from cluster.policies.routing_policy import RoutingRules
from cluster.simulation.client import Job, spec_of
from cluster.simulation.router_times import RouterTimes
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import PoolShape, SystemShape
from cluster.simulation.trace_jobs import TraceScale, trace_jobs
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits

_LENGTH = 1 / 16
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8_192
_CACHE_TOKENS = 860_000 // 16
_STEP_TOKENS = 2_048


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.simulation.prefix_replay", description=__doc__)
    parser.add_argument("--trace", type=Path, default=MOONCAKE_CONVERSATION)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--cache-tokens", type=int, default=_CACHE_TOKENS)
    parser.add_argument("--engine", action="store_true", help="run a real engine too: minutes")
    options = parser.parse_args()
    jobs = replay_jobs(options.trace, options.requests)
    num_tokens = sum(job.prompt_len for job in jobs)
    found = {
        "reference": by_reference(jobs, options.cache_tokens),
        "simulator": by_simulator(jobs, options.cache_tokens),
    }
    if options.engine:
        began_s = time.monotonic()
        found["engine"] = by_engine(jobs, options.cache_tokens)
        print(f"engine: {time.monotonic() - began_s:.0f} s", flush=True)
    rows = [[name, f"{sum(tokens):,}", f"{100 * sum(tokens) / num_tokens:.2f} %"] for name, tokens in found.items()]
    print(f"{len(jobs)} prompts of {num_tokens:,} tokens; a cache of {options.cache_tokens:,}")
    print(table(["", "tokens found", "of all"], rows))
    shares = [sum(tokens) / num_tokens for tokens in found.values()]
    return 0 if max(shares) - min(shares) <= 0.02 else 1


def replay_jobs(trace: Path, num_requests: int) -> list[Job]:
    """So far apart that each is over before the next."""
    scale = TraceScale(length=_LENGTH, max_requests=num_requests)
    jobs = trace_jobs(read_trace(trace, num_requests), scale, _MAX_MODEL_LEN)
    return [replace(job, index=index, arrival_s=60.0 * index) for index, job in enumerate(jobs)]


def by_reference(jobs: Sequence[Job], cache_tokens: int) -> list[int]:
    """Tokens of each prompt. Blocks are those of the engine, named by the trace's. What answers take counts."""
    cache = LruReference(cache_tokens // _BLOCK_SIZE)
    names: dict[tuple[tuple[int, ...], int], int] = {}
    found = []
    for job in jobs:
        num_blocks = job.prompt_len // _BLOCK_SIZE
        num_answered = (job.prompt_len + job.output_len - 1) // _BLOCK_SIZE - num_blocks
        ends = [(index + 1) * _BLOCK_SIZE for index in range(num_blocks)]
        blocks = [_name(names, job, end) for end in ends]
        answer = [-(job.index * 1_000_000 + index + 1) for index in range(num_answered)]
        most = (job.prompt_len - 1) // _BLOCK_SIZE
        found.append(min(cache.take([*blocks, *answer]), most) * _BLOCK_SIZE)
    return found


def _name(names: dict[tuple[tuple[int, ...], int], int], job: Job, end: int) -> int:
    """Of the block that ends there: the hash ids that reach into it or lie before it, and its place."""
    num_ids = min(-(-end // job.block_tokens), len(job.hash_ids))
    return names.setdefault((job.hash_ids[:num_ids], end), len(names))


def by_simulator(jobs: Sequence[Job], cache_tokens: int) -> list[int]:
    """Likewise, of one colocated replica."""
    limits = PoolLimits(cache_tokens // _BLOCK_SIZE, _BLOCK_SIZE, 16, _STEP_TOKENS)
    shape = SystemShape(
        num_routers=1,
        prefill=None,
        decode=PoolShape(1, limits, lag=1),
        admission=AdmissionPolicy(),
        num_host_blocks=0,
        max_model_len=_MAX_MODEL_LEN,
        rules=RoutingRules(False, 0, False),
        times=RouterTimes(30.0, 30.0, 600.0, max_queued_requests=256),
        has_prefix_cache=True,
    )
    clients = SimulatedSystem(shape, h100_costs()).run(jobs).clients
    return [client.attempt.decode_found if client.attempt is not None else 0 for client in clients]


def by_engine(jobs: Sequence[Job], cache_tokens: int) -> list[int]:
    """Likewise, of one on this machine's CPU. Blocks for minutes."""
    from benchmarks.engine.engine_streams import EngineStreams
    from replicas.serving.engine_builder import build_engine
    from replicas.settings import EngineSettings, KvSettings, ModelSettings, TransferSettings

    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), 1 + max(_ids(jobs)))
        settings = EngineSettings(
            pool="decode",
            served_model_name="replay",
            model=ModelSettings(folder, folder, "float32", _MAX_MODEL_LEN, "dummy", False),
            transfer=TransferSettings(
                "UCX", lease_s=30.0, verify_digest=True, net_devices=None, max_bytes_in_flight=1 << 29
            ),
            device="cpu",
            num_threads=1,
            kv=KvSettings(block_size=_BLOCK_SIZE),
            kv_capacity_tokens=cache_tokens,
            kv_memory_bytes=None,
            kv_memory_fraction=None,
            max_running_sequences=16,
            max_batch_tokens=_STEP_TOKENS,
            lag=1,
        )
        built = build_engine(settings, "replay")
        built.start()
        try:
            with EngineStreams(built.engine) as streams:
                specs = [spec_of(job, job.prompt_len, job.output_len) for job in jobs]
                return streams.found([replace(spec, stop_token_ids=frozenset()) for spec in specs])
        finally:
            built.stop()


def _ids(jobs: Iterable[Job]) -> Iterable[int]:
    return (max(job.prompt_ids()) for job in jobs)


def _write_model(folder: Path, vocab_size: int) -> None:
    """As small as can be with so many tokens. Its texts mean nothing."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2 * _MAX_MODEL_LEN,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
