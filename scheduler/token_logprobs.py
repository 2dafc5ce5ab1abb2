"""How likely the model thought a token, and which others it thought likely."""

from __future__ import annotations

from dataclasses import dataclass

# Stands for every smaller log-probability, minus infinity included: JSON has none.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: natural logarithms of the softmax of the model's own logits.

    Before temperature, penalties, bias and filters: they say what the model believes, not what was drawn from. Never
    below LOWEST_LOGPROB. top: the most likely token ids with theirs, the most likely first, ties by lower id; it has
    as many as were asked for and need not contain the token itself.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What the model thought of prompt tokens start, start + 1, ...; None of token 0, which nothing precedes."""

    request_id: str
    start: int
    positions: tuple[TokenLogprobs | None, ...]
