"""Tokens that a GPU step has chosen, on their way to the host: read without waiting for the steps behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replicas.token_choice import TokenChoice


@dataclass(frozen=True, slots=True)
class TokensOnTheWay(TokenChoice):
    """tokens: int64 [R] in pinned memory, there when `copied` has happened. (Scores are still read from the device.)"""

    copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, choice: TokenChoice) -> TokensOnTheWay:
        """Start the copy, behind the step in the current stream. Does not wait."""
        host = torch.empty(choice.tokens.shape, dtype=choice.tokens.dtype, pin_memory=True)
        host.copy_(choice.tokens, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(host, choice.scored, choice.num_top, choice.scores, copied)

    def read_tokens(self) -> list[int]:
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens
