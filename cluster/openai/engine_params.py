"""How tokens are chosen, from the words of a request body to those of the engine."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from cluster.api_error import ApiError
from cluster.same_names import by_names
from scheduler.beam_search import BeamParams
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.openai.sampling import SamplingFields
    from cluster.text.tokenizer import Tokenizer

_SEED_MASK = (1 << 64) - 1


def beam_params(body: SamplingFields) -> BeamParams | None:
    """None without beam search."""
    if not body.use_beam_search:
        return None
    return BeamParams(body.num_generated_choices, body.length_penalty, body.early_stopping)


def sampling_params(
    body: SamplingFields,
    tokenizer: Tokenizer,
    stop_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...],
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    """The body's fields by their names, and what others have become. Draws a seed if the body has none, so each call
    gives another. Raises ApiError 400 for unknown token ids, and where no token would ever be left to choose.
    """
    for name in body.token_id_fields():
        tokenizer.check_ids(list(getattr(body, name)), name)
    if body.allowed_token_ids:
        forbidden = {ids[0] for ids in bad_words if len(ids) == 1} | (stop_ids if body.min_tokens else frozenset())
        if forbidden.issuperset(body.allowed_token_ids):
            message = "allowed_token_ids has only tokens that bad_words or min_tokens forbid"
            raise ApiError(400, message, param="allowed_token_ids", code="invalid_value")
    if (beam := beam_params(body)) is not None:
        return beam.sampling(len(stop_ids), num_prompt_logprobs)
    if body.best_of is not None and body.best_of > body.n:
        num_logprobs = num_logprobs or 0  # they decide which are the best
    return by_names(
        SamplingParams,
        body,
        seed=secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK,
        bad_words=bad_words,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        thinking=None,  # of chats alone, which add it
    )
