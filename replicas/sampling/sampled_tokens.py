"""From a step's logits to its tokens: rules, sampling, log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.sampling.draw import sample
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.slot_state import SlotState
from replicas.sampling.token_scores import TokenScores
from scheduler.token_logprobs import TokenLogprobs

# What a row gets whose logits are no numbers: its request fails, instead of going on with some token.
NOT_A_TOKEN = -1
# What a row gets whose rules forbid every token: its request fails likewise.
NOTHING_ALLOWED = -2


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one step, on the logits' device, in the order of its places.

    tokens: int64 [R], ids, NOT_A_TOKEN or NOTHING_ALLOWED. scores: of the rows named in scored, with how many of the
    most likely tokens each; None when nobody asked.
    """

    tokens: Tensor
    scored: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
    scores: TokenScores | None = None

    @property
    def is_on_the_way(self) -> bool:
        """Whether a reader may have to wait for them."""
        return False

    def read_tokens(self) -> list[int]:
        """Blocks until they are there."""
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def read_accepted(self) -> tuple[tuple[int, int], ...] | None:
        """Of each row of a plan with drafts that only the device knows: how many of its tokens count, and how many
        drafts it had. None: the plan that was computed has them all as guesses. Blocks until they are there."""
        return None

    def read_logprobs(self) -> Mapping[int, TokenLogprobs]:
        """By row. Blocks until they are there."""
        if self.scores is None:
            return {}
        return dict(zip(self.scored, self.scores.read(self.num_top), strict=True))


def sample_tokens(
    logits: Tensor, places: Sequence[SamplePlace], slots: SlotState, masks: TokenMasks | None = None
) -> SampledTokens:
    """One token for each row of logits, float32 [R, V]. Mutates the logits, and the slots: they remember the tokens.

    masks: what grammars allow; the rules cannot add to it. A slot with neither rules nor logprobs, and without a mask,
    costs what sampling costs. Does not synchronise with the host, but for guesses (on a CPU).
    """
    scored = tuple(i for i, p in enumerate(places) if p.slot in slots.num_logprobs) if slots.num_logprobs else ()
    own_logits = logits[list(scored)] if scored else None  # a copy, before the rules
    ruled = slots.rules.apply(logits, places, masks)
    tokens = _checked(sample(logits, slots.sampling_batch(places)), logits, ruled)
    if own_logits is None:
        choice = SampledTokens(tokens)
    else:
        num_top = tuple(slots.num_logprobs[places[index].slot] for index in scored)
        choice = SampledTokens(tokens, scored, num_top, TokenScores.of(own_logits, tokens[list(scored)], max(num_top)))
    # Last, as nothing may raise after it: a step that fails is run again, from the slots as they were.
    slots.store_tokens(places, tokens)
    return choice


def _checked(tokens: Tensor, logits: Tensor, ruled: list[int]) -> Tensor:
    """tokens [R], but where the chosen logit is not finite. NaN wins every argmax: it is seen anywhere."""
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    checked = torch.where(chosen.isfinite(), tokens, NOT_A_TOKEN)
    if ruled:
        checked[ruled] = torch.where(chosen[ruled].isneginf(), NOTHING_ALLOWED, checked[ruled])
    return checked
