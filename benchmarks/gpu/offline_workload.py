"""What two engines are compared by: the same prompts and lengths, timed the same way. No engine is imported here."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Any, Protocol

Prompts = list[list[int]]

PROMPT_LEN, NUM_TOKENS = 1009, 128  # a context of 1,073 tokens on the average
FEWEST_STEPS = 10  # of which a mean is taken
_BATCHES = (1, 16, 64, 256)
_PREFILLS = ((1, 512), (1, 2048), (16, 2048), (4, 8192))


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """duration_s: from handing all prompts over until the last token is there.

    steady_step_ms: mean time of a step while every sequence was decoding, after the last one's first token and until
    the first one's last; None when there were too few such steps.
    """

    duration_s: float
    num_output_tokens: int
    steady_step_ms: float | None


class OfflineEngine(Protocol):
    """An engine in this process (or below it), loaded and warm."""

    def generate(self, prompts: Prompts, max_tokens: list[int]) -> OfflineRun:
        """Greedy, no end before max_tokens, all at once. Blocks."""
        ...

    def close(self) -> None:
        """End the engine. Blocks."""
        ...


def steady_window_ms(times_s: list[float], first_end: int, num_tokens: int) -> float | None:
    """Mean step while all of several sequences of num_tokens tokens each decode.

    times_s: the end of each step that gave a token; first_end: the step in which a sequence first ended. The sequence
    that began last has a token in each of the last num_tokens steps. None when there are too few steps between.
    """
    last_start = len(times_s) - num_tokens
    num_steps = first_end - last_start
    if last_start < 0 or num_steps < FEWEST_STEPS:
        return None
    return 1000 * (times_s[first_end] - times_s[last_start]) / num_steps


def decode_steps(engine: OfflineEngine, batches: tuple[int, ...] = _BATCHES) -> dict[str, float | None]:
    """ms of a decode step by batch. Small batches twice, of which the faster counts."""
    rng = random.Random(1)
    steps: dict[str, float | None] = {}
    for batch in batches:
        # While the prompts of a large batch are computed, the first ones decode already.
        num_tokens = NUM_TOKENS if batch < 128 else NUM_TOKENS + 72
        runs = [
            engine.generate(random_prompts(rng, [PROMPT_LEN] * batch), [num_tokens] * batch)
            for _ in range(2 if batch < 128 else 1)
        ]
        found = [run.steady_step_ms for run in runs if run.steady_step_ms is not None]
        steps[f"step B={batch}, ms"] = min(found, default=None)
    return steps


def prefills(engine: OfflineEngine, cases: tuple[tuple[int, int], ...] = _PREFILLS) -> dict[str, float]:
    """From the call until the first tokens are there, median of three: ms of one prompt, tokens a second of several."""
    rng = random.Random(2)
    figures = {}
    for count, length in cases:
        times_s = [
            engine.generate(random_prompts(rng, [length] * count), [1] * count).duration_s for _ in range(4)
        ]  # the first is not counted: kernels may be prepared for the length
        time_s = statistics.median(times_s[1:])
        if count == 1:
            figures[f"prefill 1x{length}, ms"] = 1000 * time_s
        else:
            figures[f"prefill {count}x{length}, tok/s"] = count * length / time_s
    return figures


def offline_throughput(engine: OfflineEngine, num_requests: int = 256, longest: int = 1024) -> dict[str, float]:
    """Output tokens a second of requests with U(100, longest) tokens in and out, all there at the start."""
    rng = random.Random(3)
    lengths = [(rng.randint(100, longest), rng.randint(100, longest)) for _ in range(num_requests)]
    run = engine.generate(random_prompts(rng, [n for n, _ in lengths]), [n for _, n in lengths])
    name = f"offline, {num_requests} x U(100,{longest}), tok/s"
    return {name: run.num_output_tokens / run.duration_s}


def measure(engine: OfflineEngine) -> dict[str, Any]:
    """Every figure, in the order of the table."""
    rng = random.Random(0)
    engine.generate(random_prompts(rng, [300] * 16), [16] * 16)
    return {**decode_steps(engine), **prefills(engine), **offline_throughput(engine)}


def random_prompts(rng: random.Random, lengths: list[int]) -> Prompts:
    return [[rng.randrange(1_000, 30_000) for _ in range(length)] for length in lengths]
