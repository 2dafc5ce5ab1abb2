"""The rules, in the order in which they change a row of logits.

transformers' and vLLM's order: bias first, then what is forbidden, then penalties of what was said before. So a
penalty works on the biased logit, and repetition_penalty, which looks at its sign, comes before presence and frequency.
The end of thinking comes last: where it is due, nothing else may be chosen, whatever the others say.
Temperature, min_p, top_k and top_p follow, in `replicas.sampling.draw`.
"""

from __future__ import annotations

from replicas.sampling.rules.allowed_tokens import AllowedTokens
from replicas.sampling.rules.bad_words import BadWords
from replicas.sampling.rules.logit_bias import LogitBias
from replicas.sampling.rules.min_tokens import MinTokens
from replicas.sampling.rules.output_penalties import OutputPenalties
from replicas.sampling.rules.repetition_penalty import RepetitionPenalty
from replicas.sampling.rules.thinking_time import ThinkingTime
from replicas.sampling.rules.token_rule import TokenRule

RULES: tuple[type[TokenRule], ...] = (
    LogitBias,
    AllowedTokens,
    BadWords,
    MinTokens,
    RepetitionPenalty,
    OutputPenalties,
    ThinkingTime,
)
