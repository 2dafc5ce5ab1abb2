"""A batch of texts whose drafts hold with known probabilities: how long it takes by a Speculator's choices, and by the
best ones, made by whoever knows these probabilities and the true times.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from scheduler.draft_acceptance import DRAFT_COUNTS, expected_accepted
from scheduler.speculation import RowSpeculation, SpeculationState
from scheduler.speculator import Speculator


class Kind(NamedTuple):
    """Of a stretch of text. found: how often anything is drafted; first, further: as DraftAcceptance has them."""

    first: float
    further: float
    found: float = 1.0

    def expected(self, num_drafts: int, *, is_padded: bool) -> float:
        return (self.found if is_padded else 1.0) * expected_accepted(self.first, self.further, num_drafts)


NOTHING = Kind(0.03, 0.2)
REPETITIVE = Kind(0.85, 0.93)

StepS = Callable[[int, int], float]  # drafts, tokens


@dataclass
class Text:
    """kinds: of its stretches, each so many tokens long."""

    kinds: Sequence[Kind]
    lengths: Sequence[int]
    start: int = 200  # position
    num_done: int = 0
    state: SpeculationState = field(default_factory=SpeculationState)

    def __post_init__(self) -> None:
        self.ends = list(accumulate(self.lengths))

    @property
    def kind(self) -> Kind:
        return self.kinds[bisect_left(self.ends, self.num_done + 1)]

    @property
    def num_left(self) -> int:
        return self.ends[-1] - self.num_done


@dataclass
class Run:
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_switches: int = 0
    chosen: Counter[int] = field(default_factory=Counter)


# Drafts of each text in the next step.
Chooser = Callable[[Sequence[Text]], Sequence[int]]


def simulate(
    texts: Sequence[Text],
    batch: int,
    chooser: Chooser,
    step_s: StepS,
    speculator: Speculator,
    *,
    is_padded: bool,
    lag: int = 1,
    seed: int = 0,
) -> Run:
    """So many texts at a time, each from the first to its last token; a text that ends makes place for the next."""
    rng = random.Random(seed)
    waiting, run = deque(texts), Run()
    running: list[Text] = []
    unsettled: deque[list[tuple[SpeculationState, int, int, int]]] = deque()
    last = 0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.popleft())
        counts = [min(count, text.num_left - 1) for count, text in zip(chooser(running), running, strict=True)]
        step_drafts = next(count for count in (0, *DRAFT_COUNTS) if count >= max(counts))
        num_tokens, results = len(running), []
        num_context_tokens = sum([text.start + text.num_done + 1 for text in running])
        for text, count in zip(running, counts, strict=True):
            kind = text.kind
            num_drafted = count if count and rng.random() < kind.found else 0
            num_accepted = 0
            while num_accepted < num_drafted and rng.random() < (kind.further if num_accepted else kind.first):
                num_accepted += 1
            num_tokens += count if is_padded else num_drafted
            text.num_done += 1 + num_accepted
            run.num_tokens += 1 + num_accepted
            if count:
                results.append((text.state, count, num_drafted, num_accepted))
        seconds = step_s(step_drafts, num_tokens)
        run.seconds += seconds
        run.num_steps += 1
        run.num_switches += step_drafts != last
        run.chosen[step_drafts] += 1
        last = step_drafts
        noisy_s = seconds * rng.uniform(0.97, 1.05) * (rng.uniform(1.5, 8.0) if rng.random() < 0.003 else 1.0)
        speculator.step_took(step_drafts if num_tokens > len(running) else 0, num_tokens, num_context_tokens, noisy_s)
        running = [text for text in running if text.num_left > 0]
        unsettled.append(results)
        if len(unsettled) > lag:
            for result in unsettled.popleft():
                speculator.accepted(*result)
    return run


def plain(texts: Sequence[Text]) -> Sequence[int]:
    """No drafts."""
    return (0,) * len(texts)


def by(speculator: Speculator) -> Chooser:
    """As an engine chooses."""

    def choose(texts: Sequence[Text]) -> Sequence[int]:
        rows = [RowSpeculation(text.state, text.start + text.num_done, min(7, text.num_left - 1)) for text in texts]
        return speculator.choose(rows, sum([row.position + 1 for row in rows]))

    return choose


def best(step_s: StepS, *, is_padded: bool) -> Chooser:
    """What brings most tokens a second by the true probabilities and times."""

    def choose(texts: Sequence[Text]) -> Sequence[int]:
        found, chosen = len(texts) / step_s(0, len(texts)), (0,) * len(texts)
        for count in DRAFT_COUNTS:
            gains = [text.kind.expected(min(count, text.num_left - 1), is_padded=is_padded) for text in texts]
            order = sorted(range(len(texts)), key=lambda i: -gains[i])
            for num_drafting in range(1, len(texts) + 1):
                drafting = frozenset(order[:num_drafting])
                num_tokens = len(texts) + count * num_drafting
                rate = (len(texts) + sum(gains[i] for i in drafting)) / step_s(count, num_tokens)
                if rate > found:
                    found, chosen = rate, tuple(count if i in drafting else 0 for i in range(len(texts)))
        return chosen

    return choose


def times(*points: tuple[int, float], drafting_s: float = 0.0) -> StepS:
    """Seconds on lines between points (tokens, milliseconds). drafting_s: of a step with drafts, besides."""

    def step_s(num_drafts: int, num_tokens: int) -> float:
        index = min(max(1, bisect_left(points, (num_tokens, 0.0))), len(points) - 1)
        (low, low_ms), (high, high_ms) = points[index - 1], points[index]
        ms = low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)
        return ms / 1e3 + (drafting_s if num_drafts else 0.0)

    return step_s


# Llama-3.1-8B in bfloat16 on an H200, measured; and a small model on two cores, whose time goes with the tokens.
H200 = times((1, 4.2), (16, 5.2), (32, 6.1), (64, 7.3), (128, 9.9), (256, 16.0))
CPU = times((1, 30.0), (2, 33.0), (3, 36.0), (8, 50.0), (16, 80.0), (64, 280.0))


def of_many_rows(most_rows: int) -> StepS:
    """Of so many rows, fewer at the end, of that model on that card: without drafts, or by one of the graphs that there
    are for rows with some, whose tokens are then its."""
    rows = times((1, 4.12), (16, 4.87), (64, 6.18), (128, 7.6), (192, 9.7), (256, 11.8))
    sizes = (128, 192, 288, 384, 512, 640, 768)

    def products_s(num_tokens: int) -> float:
        return max(3.4e-3, 20e-6 * num_tokens)

    def step_s(num_drafts: int, num_tokens: int) -> float:
        num_rows = min(most_rows, num_tokens)
        if not num_drafts:
            return rows(0, num_rows)
        padded = next((size for size in sizes if size >= num_tokens), num_tokens)
        return rows(0, num_rows) + products_s(padded) - products_s(num_rows) + 2e-6 * (padded - num_rows) + 1e-4

    return step_s
