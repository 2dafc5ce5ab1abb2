"""What a GPU step has chosen, on its way to the host: read without waiting for the steps behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replicas.sampling.prompt_scores import ChunkScores
from replicas.sampling.sampled_tokens import SampledTokens
from replicas.sampling.token_scores import TokenScores
from scheduler.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SettledTokens(SampledTokens):
    """accepted: int32 [rows, 2], of each row how many of its tokens count, and how many drafts it had, which the host
    does not know; None where no row has any."""

    accepted: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokensInFlight(SettledTokens):
    """Tokens, scores, and what counts, in pinned memory, there when `copied` has happened."""

    copied: torch.cuda.Event | None = None

    @classmethod
    def of(
        cls, choice: SampledTokens, prompts: Sequence[ChunkScores] = ()
    ) -> tuple[TokensInFlight, tuple[ChunkScores, ...]]:
        """Start the copies, behind the step in the current stream. The prompts' are there when the tokens are.

        Does not wait.
        """
        accepted = choice.accepted if isinstance(choice, SettledTokens) else None
        accepted = None if accepted is None else _to_host(accepted)
        tokens, scores = _to_host(choice.tokens), _scores_to_host(choice.scores)
        on_the_way = tuple(replace(prompt, scores=_scores_to_host(prompt.scores)) for prompt in prompts)
        copied = torch.cuda.Event()
        copied.record()
        return cls(tokens, choice.scored, choice.num_top, scores, accepted, copied), on_the_way

    @property
    def is_on_the_way(self) -> bool:
        return self.copied is not None

    def read_tokens(self) -> list[int]:
        self._wait()
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def read_accepted(self) -> tuple[tuple[int, int], ...] | None:
        if self.accepted is None:
            return None
        self._wait()
        return tuple((counted, drafted) for counted, drafted in self.accepted.tolist())

    def read_logprobs(self) -> Mapping[int, TokenLogprobs]:
        self._wait()
        return SampledTokens.read_logprobs(self)

    def _wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


def _scores_to_host(scores: TokenScores | None) -> TokenScores | None:
    if scores is None:
        return None
    return TokenScores(_to_host(scores.logprob), _to_host(scores.top_ids), _to_host(scores.top_logprobs))


def _to_host(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    host.copy_(values, non_blocking=True)
    return host
