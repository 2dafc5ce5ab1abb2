"""A token in the text that it is part of, with what the model thought of it."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token in its text.

    text: what it added; empty while a character is incomplete, and for special tokens that are not shown.
    offset: where that begins, in characters. logprobs: None of the first token of a prompt.
    """

    token_id: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None
