"""What the rules of token choice should do to a row of logits, by transformers' processors or by the definition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from scheduler.sampling_params import SamplingParams
from scheduler.thinking_budget import ThinkingBudget


@dataclass(frozen=True)
class Row:
    """What a rule looks at besides a row of logits: the sequence so far."""

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    num_output_in_prompt: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def num_generated(self) -> int:
        return self.num_output_in_prompt + len(self.output)


def expected(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """One row, by transformers' processors and, where it has none, by the definition. In the documented order."""
    params = row.params
    ids = [*row.prompt, *row.output]
    input_ids, scores = torch.tensor([ids]), logits[None].clone()
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(t,): bias for t, bias in params.logit_bias})(input_ids, scores)
    if params.allowed_token_ids:
        forbidden = torch.ones(len(logits), dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        scores = scores.masked_fill(forbidden, -torch.inf)
    num_prompt = len(ids) - row.num_generated
    processors = LogitsProcessorList()
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, list(row.stop_token_ids)))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = processors(input_ids, scores)
    for token_id, count in Counter(ids[num_prompt:]).items():
        scores[0, token_id] -= count * params.frequency_penalty + params.presence_penalty
    if params.thinking is not None and is_thinking_over(params.thinking, ids[num_prompt:]):
        scores = torch.full_like(scores, -torch.inf)
        scores[0, params.thinking.closer_id] = 0.0
    return scores[0]


def is_thinking_over(budget: ThinkingBudget, output: list[int]) -> bool:
    """By the definition, token by token."""
    is_open, num_thought = budget.is_opened, 0
    for token_id in output:
        if token_id == budget.opener_id:
            is_open, num_thought = True, 0
        elif token_id == budget.closer_id:
            is_open = False
        else:
            num_thought += is_open
    return is_open and num_thought >= budget.num_tokens
