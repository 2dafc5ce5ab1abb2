"""What a simulated engine did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounts:
    """decision_s: CPU time that its scheduler took, the only thing here that is not simulated."""

    num_steps: int = 0
    num_skipped_steps: int = 0  # of which were taken many at once
    num_decisions: int = 0  # iterations that were not skipped
    decision_s: float = 0.0
    busy_s: float = 0.0  # in iterations with something to compute
    num_rows: int = 0
    num_prompt_tokens: int = 0
