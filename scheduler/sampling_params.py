"""How the next token of a sequence is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.thinking_budget import ThinkingBudget


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request's token choice; the same for all its choices. The defaults change nothing.

    Rules apply to a row of logits in this order: logit_bias; what is forbidden (allowed_token_ids, bad_words,
    min_tokens); repetition, then presence and frequency penalty; temperature; min_p; top_k; top_p; the draw. Greedy
    choice obeys all of them before temperature. Token ids are the vocabulary's: whoever makes one of these checks.

    temperature: 0 means greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 and -1 keep all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1.0 keeps all, 0.0 the best.
    seed: 64-bit key of the noise. Always set: the ingress draws one when the client gave none.
    min_p: keep tokens at least min_p times as likely as the most likely one; 0.0 keeps all.
    presence_penalty: taken once from the logit of every token of the output so far; negative: added.
    frequency_penalty: taken from a token's logit as often as the output so far holds it.
    repetition_penalty: above 1.0 makes every token of prompt and output so far less likely: a positive logit is
        divided by it, a negative one multiplied. Greater than 0; 1.0 changes nothing.
    logit_bias: (token id, what is added to its logit).
    bad_words: token sequences none of which may ever be completed by the output; no sequence is empty.
    allowed_token_ids: no other token may be chosen; empty: any.
    min_tokens: the request's stop token ids can't be chosen until so many tokens have been generated.
    num_logprobs: None: none; 0: the chosen token's; k: also those of the k most likely tokens.
    num_prompt_logprobs: the same, of every prompt token but the first.
    thinking: how long the model may think; goes before all that is said above of what may be chosen.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    thinking: ThinkingBudget | None = None
