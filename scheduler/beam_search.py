"""Beam search over one prompt: a frozen state, and what becomes of it when the next candidates are known. Pure.

The rules are those of transformers' `generate(num_beams=width, do_sample=False)` as its releases since 4.50 have them
(`GenerationMixin._beam_search`), for a batch of one and without its sentinel scores:

1. All candidates of all live beams are ranked by their summed log-probability. Ties: the better beam, then the token
   that its beam ranks higher.
2. A candidate ends with a stop token, or because it has max_tokens. One that ends among the first `width` of the
   ranking becomes a hypothesis; further down it is dropped.
3. The best `width` that do not end live on, best first.
4. A hypothesis scores its sum / length ** length_penalty, the stop token counted in both. The best `width` are kept; of
   equal ones those that were there before.
5. The search is over when nothing lives on, or when `width` hypotheses are kept and
   - early_stopping is True, or
   - the best live beam, scored as if it ended at its present length, is no better than the worst of them. With "never"
     and a positive length_penalty it is scored as if its sum stayed the same up to max_tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.generated_token import FinishReason
from scheduler.sampling_params import SamplingParams

# A token that may come next, and its log-probability given everything before it.
Candidate = tuple[int, float]

MAX_LENGTH_PENALTY = 10.0  # either way; length ** penalty stays a number far from float64's ends


@dataclass(frozen=True, slots=True)
class BeamParams:
    """What a client chooses. width: beams that live at a time, and hypotheses that are kept.

    length_penalty: above 0 favours long hypotheses (sums are negative), below 0 short ones, 0 compares bare sums.
    Raises ValueError for values that mean nothing.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        if not math.isfinite(self.length_penalty) or abs(self.length_penalty) > MAX_LENGTH_PENALTY:
            most = MAX_LENGTH_PENALTY
            raise ValueError(f"length_penalty must lie between {-most} and {most}, got {self.length_penalty}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f'early_stopping must be true, false or "never", got {self.early_stopping!r}')

    def num_candidates(self, num_stop_tokens: int) -> int:
        """How many of its most likely tokens each beam must offer for the rules above to see all that they may choose.

        Rule 2 looks at no more than `width` candidates, rule 3 at no more than `width` that are no stop tokens.
        """
        return self.width + num_stop_tokens

    def sampling(self, num_stop_tokens: int, num_prompt_logprobs: int | None = None) -> SamplingParams:
        """What a search asks of each row: nothing is sampled, it wants the likeliest tokens by the model's own logits.

        num_prompt_logprobs: as a client asks for them.
        """
        num_candidates = self.num_candidates(num_stop_tokens)
        return SamplingParams(temperature=0.0, num_logprobs=num_candidates, num_prompt_logprobs=num_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that goes on. parent: index, among the beams before, of the one that it continues."""

    token_ids: tuple[int, ...]
    log_prob: float  # sum over token_ids
    parent: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The state between two steps. It begins with one beam that has no tokens: the prompt.

    beams: best first, fewer than `width` only where candidates are too few. hypotheses: best first, at most `width`.
    """

    params: BeamParams
    stop_token_ids: frozenset[int]
    max_tokens: int
    beams: tuple[Beam, ...] = (Beam((), 0.0, 0),)
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def length(self) -> int:
        """Tokens that each live beam has."""
        return len(self.beams[0].token_ids)

    @property
    def is_over(self) -> bool:
        """Rule 5."""
        if not self.beams:
            return True
        if len(self.hypotheses) < self.params.width:
            return False
        early_stopping, penalty = self.params.early_stopping, self.params.length_penalty
        if early_stopping is True:
            return True
        length = self.max_tokens if early_stopping == "never" and penalty > 0 else self.length
        return self._score(self.beams[0].log_prob, length) <= self.hypotheses[-1].score

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> BeamSearch:
        """The state after one more token.

        candidates: of each live beam, in their order, its num_candidates most likely tokens, best first.
        """
        assert not self.is_over, "a search that is over has no next step"
        width, length = self.params.width, self.length + 1
        ranked = [
            (beam.log_prob + log_prob, parent, token_id)
            for parent, (beam, offered) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, log_prob in offered
        ]
        ranked.sort(key=lambda candidate: -candidate[0])  # stable: ties stay in the order of rule 1
        beams: list[Beam] = []
        ended: list[Hypothesis] = []
        for rank, (log_prob, parent, token_id) in enumerate(ranked):
            reason = self._finish_reason(token_id, length)
            if reason is None and len(beams) < width:
                beams.append(Beam((*self.beams[parent].token_ids, token_id), log_prob, parent))
            elif reason is not None and rank < width:
                token_ids = (*self.beams[parent].token_ids, token_id)
                ended.append(Hypothesis(token_ids, self._score(log_prob, length), reason))
        kept = sorted([*self.hypotheses, *ended], key=lambda hypothesis: -hypothesis.score)[:width]
        return replace(self, beams=tuple(beams), hypotheses=tuple(kept))

    def _score(self, log_prob: float, length: int) -> float:
        return float(log_prob / length**self.params.length_penalty)

    def _finish_reason(self, token_id: int, length: int) -> FinishReason | None:
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_tokens else None
