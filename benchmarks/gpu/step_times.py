"""Times of single steps on the card, by device events, launched one behind the other as the engine does."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine.step_plans import decode_step, set_up
from replicas.model.model_runner import ModelRunner
from scheduler.memory_budget import num_blocks_for
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)


def device_ms(action: Callable[[], object], num_repeats: int, warm_up: int = 3) -> float:
    """Mean device time of an action that is launched num_repeats times in a row; median of three such runs."""
    for _ in range(warm_up):
        action()
    times_ms = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(num_repeats):
            action()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end) / num_repeats)
    return statistics.median(times_ms)


def decode_ms(runner: ModelRunner, batch: int, context: int, sampling: SamplingParams, num_repeats: int = 20) -> float:
    """One decode step of `batch` rows that each attend over context + 1 tokens."""
    plan = set_up(batch, context, runner.pool.layout.block_size, sampling)
    runner.launch(plan).result()
    step = decode_step(batch, context)
    return device_ms(lambda: runner.launch(step), num_repeats)


def prefill_plan(count: int, length: int, block_size: int) -> StepPlan:
    rng = random.Random(length)
    num_blocks = num_blocks_for(length + 1, block_size)
    chunks, writes, inits = [], [], []
    for slot in range(count):
        ids = tuple(rng.randrange(1_000, 30_000) for _ in range(length))
        chunks.append(Slice.of_prompt(f"prompt-{slot}", slot, 0, ids, (SampleTarget(slot, 0),)))
        writes.append(TableWrite(slot, 0, tuple(range(slot * num_blocks, (slot + 1) * num_blocks))))
        inits.append(SlotInit(slot, 0, GREEDY, None))
    return StepPlan(0, tuple(inits), tuple(writes), (), tuple(chunks))


def prefill_ms(runner: ModelRunner, count: int, length: int, num_repeats: int = 3) -> float:
    """Wall time of one step of `count` fresh prompts, from its launch until its tokens are read."""
    plan = prefill_plan(count, length, runner.pool.layout.block_size)
    runner.launch(plan).result()
    plan = replace(plan, slot_inits=(), table_writes=())
    times_ms = []
    for _ in range(num_repeats):
        started_s = time.perf_counter()
        runner.launch(plan).result()
        times_ms.append(1000 * (time.perf_counter() - started_s))
    return statistics.median(times_ms)


def launch_cpu_us(runner: ModelRunner, batch: int, context: int) -> float:
    """Host time of launching one decode step, the device kept idle before: what overlap has to hide."""
    runner.launch(set_up(batch, context, runner.pool.layout.block_size, GREEDY)).result()
    step = decode_step(batch, context)
    times_s = []
    for _ in range(20):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        runner.launch(step)
        times_s.append(time.perf_counter() - started_s)
    return 1e6 * statistics.median(times_s)


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned text; every row has the columns of the first."""
    names = list(rows[0])
    cells = [names] + [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
