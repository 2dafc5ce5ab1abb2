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

    logprob: float32 [n]. top_ids: int64 [n, k], top_logprobs: float32 [n, k], the most likely first, of equally likely
    ones the smallest id.
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
        top_ids = _most_likely(logprobs, min(num_top, logits.shape[1]))
        return TokenScores(logprob, top_ids, logprobs.gather(1, top_ids))

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


def _most_likely(logprobs: Tensor, k: int) -> Tensor:
    """int64 [n, k], ids of the k largest of each row, float32 [n, V]; of equal ones the smallest ids, in their order.

    topk alone takes any of equal ones, others for another k: then what one request is told would depend on the largest
    k in its batch.
    """
    if k == 0:
        return torch.empty(logprobs.shape[0], 0, dtype=torch.int64, device=logprobs.device)
    if logprobs.device.type == "cpu":  # a GPU would have to be waited for
        least = logprobs.topk(k, dim=-1).values[:, -1:]
        is_top = logprobs >= least
        if bool((is_top.sum(dim=-1) == k).all()):  # no row has several that equal its last one, or NaN
            ids = is_top.nonzero()[:, 1].view(-1, k)
            return ids.gather(1, logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    return _first_of_equal_ones(logprobs, k)


def _first_of_equal_ones(logprobs: Tensor, k: int) -> Tensor:
    """The same in any case: each number and its id are made one integer, and no two are equal."""
    vocab_size = logprobs.shape[1]
    keys = (logprobs + 0.0).view(torch.int32).long()  # + 0.0: there is a -0.0, which equals 0.0
    keys ^= (keys >> 63) & 0x7FFFFFFF  # of negative floats the larger integer is the smaller number
    keys <<= 32
    keys += torch.arange(vocab_size - 1, -1, -1, device=logprobs.device)
    return vocab_size - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _finite(logprob: float) -> float:
    return LOWEST_LOGPROB if logprob < LOWEST_LOGPROB else logprob
