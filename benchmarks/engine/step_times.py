"""Times of single engine steps: what a step costs, without queue, channel or HTTP."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine.reference_model import ReferenceModel
from benchmarks.engine.step_plans import decode_step, prefill_steps, set_up
from replicas.model.model_runner import ModelRunner


def decode_step_times(
    runner: ModelRunner, batches: list[int], contexts: list[int], num_repeats: int
) -> list[dict[str, Any]]:
    """One row for each batch and context. Mutates pool and slots."""
    rows = []
    for batch in batches:
        for context in contexts:
            if (
                batch * (context + runner.pool.layout.block_size)
                > runner.pool.num_blocks * runner.pool.layout.block_size
            ):
                continue
            runner.launch(set_up(batch, context, runner.pool.layout.block_size)).result()
            plan = decode_step(batch, context)
            times_ms = timed_ms(lambda plan=plan: runner.launch(plan).result(), num_repeats)  # type: ignore[misc]
            median_ms = statistics.median(times_ms)
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "step_ms": median_ms,
                    "slowest_ms": max(times_ms),
                    "tokens_per_s": 1000 * batch / median_ms,
                }
            )
    return rows


def prefill_times(
    runner: ModelRunner, reference: ReferenceModel, lengths: list[int], step_tokens: int, num_repeats: int
) -> list[dict[str, Any]]:
    """Prompts through our steps and through transformers in one piece, in turns. Mutates pool and slots."""
    rng = random.Random(0)
    rows = []
    for length in lengths:
        ids = [rng.randrange(1_000, 30_000) for _ in range(length)]
        plans = prefill_steps(ids, step_tokens, runner.pool.layout.block_size)
        ours_ms, theirs_ms = [], []
        for _ in range(num_repeats):
            ours_ms += timed_ms(lambda plans=plans: [runner.launch(plan).result() for plan in plans], 1)  # type: ignore[misc]
            theirs_ms += timed_ms(lambda ids=ids: reference.prefill(ids), 1)  # type: ignore[misc]
        ours, theirs = statistics.median(ours_ms), statistics.median(theirs_ms)
        rows.append(
            {
                "length": length,
                "tokens_per_s": 1000 * length / ours,
                "transformers_tokens_per_s": 1000 * length / theirs,
                "ratio": theirs / ours,
            }
        )
    return rows


def timed_ms(action: Callable[[], object], num_repeats: int) -> list[float]:
    """Each repeat's wall time."""
    times_ms = []
    for _ in range(num_repeats):
        started_s = time.perf_counter()
        action()
        times_ms.append(1000 * (time.perf_counter() - started_s))
    return times_ms
