"""A beam search to be tried."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.beam_search import BeamParams


@dataclass(frozen=True, slots=True)
class BeamCase:
    """num_returned: how many of its texts are wanted."""

    prompt_ids: tuple[int, ...]
    params: BeamParams
    num_returned: int
    max_tokens: int
    stop_token_ids: frozenset[int]
