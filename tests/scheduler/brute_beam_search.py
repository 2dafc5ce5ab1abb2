"""Beam search done the slow way: the published rules over whole vocabularies, with sentinel scores as transformers has.

Written from transformers 5.24 `GenerationMixin._beam_search` and its helpers, step for step, with lists for tensors. It
shares nothing with scheduler.beam_search, which sees only the best candidates of each beam and has no sentinels.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_NEVER_CHOSEN = -1.0e9

# The text so far -> log-probability of every token.
Model = Callable[[tuple[int, ...]], list[float]]


def random_model(seed: int, vocab_size: int, spread: float = 2.0) -> Model:
    """Probabilities drawn anew for every text, so that nothing is symmetric."""

    def log_probs(text: tuple[int, ...]) -> list[float]:
        rng = random.Random(hash((seed, *text)))
        return [-rng.expovariate(1.0) * spread for _ in range(vocab_size)]

    return log_probs


def search(
    model: Model,
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
    stops: frozenset[int],
    max_tokens: int,
) -> list[tuple[tuple[int, ...], float]]:
    """All `width` texts with their scores, best first."""
    running: list[tuple[int, ...]] = [()] * width
    running_scores = [0.0] + [_NEVER_CHOSEN] * (width - 1)
    texts: list[tuple[int, ...]] = [()] * width
    scores = [_NEVER_CHOSEN] * width
    finished = [False] * width
    length = 0
    while True:
        every = [
            (score + log_prob, (*text, token))
            for text, score in zip(running, running_scores, strict=True)
            for token, log_prob in enumerate(model(text))
        ]
        top = sorted(every, key=lambda item: -item[0])[: max(2, 1 + len(stops)) * width]
        length += 1
        ends = [text[-1] in stops or length >= max_tokens for _, text in top]
        # The beams of the next iteration.
        go_on = sorted(
            ((score + end * _NEVER_CHOSEN, text) for (score, text), end in zip(top, ends, strict=True)),
            key=lambda item: -item[0],
        )[:width]
        running_scores, running = [score for score, _ in go_on], [text for _, text in go_on]
        # What has ended.
        merged = list(zip(scores, texts, finished, strict=True))
        for rank, ((score, text), end) in enumerate(zip(top, ends, strict=True)):
            has_ended = end and rank < width
            merged.append((score / length**length_penalty + (not has_ended) * _NEVER_CHOSEN, text, has_ended))
        merged = sorted(merged, key=lambda item: -item[0])[:width]
        scores, texts, finished = (list(column) for column in zip(*merged, strict=True))
        # Whether it is worth going on.
        reach = max_tokens if early_stopping == "never" and length_penalty > 0.0 else length
        hope = running_scores[0] / reach**length_penalty
        can_improve = any(hope > (min(scores) if is_done else _NEVER_CHOSEN) for is_done in finished)
        if not can_improve or (all(finished) and early_stopping is True) or all(ends):
            return [(text, score) for text, score, is_done in zip(texts, scores, finished, strict=True) if is_done]
