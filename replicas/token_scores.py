"""Log-probabilities of tokens, by the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scheduler.token_logprobs import LOWEST_LOGPROB, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of n tokens, on the logits' device.

    logprob: float32 [n]. top_ids: int64 [n, k], top_logprobs: float32 [n, k], the most likely first.
    """

    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
        """Of one token for each row of logits, float32 [n, V]. Mutates nothing, does not synchronise with the host."""
        logprobs = logits.log_softmax(dim=-1)
        # A failed row has no token: any id will do, nobody reads its score.
        logprob = logprobs.gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
        top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
        return TokenScores(logprob, top.indices, top.values)

    @staticmethod
    def join(parts: Sequence[TokenScores]) -> TokenScores:
        """One after the other; all of the same k."""
        return TokenScores(
            torch.cat([part.logprob for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
        )

    def read(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """num_top: of each token, how many of the top to return. Blocks until they are there.

        NaN logits give NaN: whoever reads this fails the request.
        """
        return [
            TokenLogprobs(_finite(logprob), tuple(zip(ids[:k], map(_finite, values[:k]), strict=True)))
            for logprob, ids, values, k in zip(
                self.logprob.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist(), num_top, strict=True
            )
        ]


def _finite(logprob: float) -> float:
    return LOWEST_LOGPROB if logprob < LOWEST_LOGPROB else logprob
