"""The rules, in the order in which they change a row of logits.

transformers' and vLLM's order: bias first, then what is forbidden, then penalties of what was said before. So a
penalty works on the biased logit, and repetition_penalty, which looks at its sign, comes before presence and frequency.
Temperature, min_p, top_k and top_p follow, in `replicas.token_choice.sampling`.
"""

from __future__ import annotations

from replicas.token_choice.token_rules.allowed_tokens import AllowedTokens
from replicas.token_choice.token_rules.bad_words import BadWords
from replicas.token_choice.token_rules.logit_bias import LogitBias
from replicas.token_choice.token_rules.min_tokens import MinTokens
from replicas.token_choice.token_rules.output_penalties import OutputPenalties
from replicas.token_choice.token_rules.repetition_penalty import RepetitionPenalty
from replicas.token_choice.token_rules.token_rule import TokenRule

RULES: tuple[type[TokenRule], ...] = (
    LogitBias,
    AllowedTokens,
    BadWords,
    MinTokens,
    RepetitionPenalty,
    OutputPenalties,
)
