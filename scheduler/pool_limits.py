"""How large one engine is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """max_step_tokens bounds prompt tokens plus rows of one step. num_reserved_blocks: of an engine that does both
    phases, kept for prompts that it computes for others (`Residents.admit`). chunk_multiple: prompts that need several
    steps are best cut at multiples of so many tokens; 1: it is all the same."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_step_tokens: int
    num_reserved_blocks: int = 0
    chunk_multiple: int = 1
