"""How long a model may think before it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After num_tokens of thinking the next token is closer_id, whatever the model would have.

    Thinking begins behind opener_id in the output, or with the output if the prompt has opened it (is_opened), and ends
    with closer_id.
    """

    num_tokens: int
    opener_id: int
    closer_id: int
    is_opened: bool = False
