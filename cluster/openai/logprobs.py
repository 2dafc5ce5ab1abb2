"""Log-probabilities of tokens in the three shapes that clients know. Pure.

The numbers are natural logarithms of the softmax of the model's own logits, before temperature and everything else
that changes what is chosen; so they may say that another token was likelier than the chosen one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.text.scored_token import ScoredToken
from replicas.messages import TokenLogprobs

if TYPE_CHECKING:
    from cluster.text.tokenizer import Tokenizer


class TokenNames:
    """How tokens by themselves are written. as_ids: "token_id:42" instead of text."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def of_token(self, token_id: int) -> str:
        """Bytes that are no UTF-8 by themselves become U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def unique(self, token_id: int) -> str:
        """The same, but such bytes are written as OpenAI does it: "bytes:\\xf0\\x9f"."""
        raw = self.raw(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return f"token_id:{token_id}" if self._as_ids else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self.of_token(token_id)

    def within_text(self, token: ScoredToken) -> str:
        """What it added to the text, so that all of them together are the text."""
        return f"token_id:{token.token_id}" if self._as_ids else token.text

    def raw(self, token_id: int) -> bytes:
        return self._tokenizer.bytes_of_token.get(token_id, b"")


@dataclass(frozen=True, slots=True)
class LogprobsReport:
    """How an answer reports log-probabilities. num_top, num_prompt_top: candidates at a position; None: no report."""

    names: TokenNames
    num_top: int | None = None
    num_prompt_top: int | None = None


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int, names: TokenNames) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.of_token(token_id), "logprob": logprob, "bytes": list(names.raw(token_id))}

    content = []
    for token in tokens:
        assert token.logprobs is not None
        top = [entry(*candidate) for candidate in token.logprobs.top[:num_top]]
        content.append(entry(token.token_id, token.logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], num_top: int, names: TokenNames) -> dict[str, Any]:
    """`logprobs` of a completion choice or chunk. The candidates at a position always include the chosen token."""
    return {
        "tokens": [names.within_text(token) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else token.logprobs.logprob for token in tokens],
        "top_logprobs": [_candidates(token, num_top, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _candidates(token: ScoredToken, num_top: int, names: TokenNames) -> dict[str, float] | None:
    if token.logprobs is None:
        return None
    candidates: dict[str, float] = {}
    for token_id, logprob in (*token.logprobs.top[:num_top], (token.token_id, token.logprobs.logprob)):
        # Of tokens that are written alike the likelier one counts, which comes first.
        candidates.setdefault(names.unique(token_id), logprob)
    return candidates


def prompt_logprobs(
    ids: Sequence[int], positions: Sequence[TokenLogprobs | None], num_top: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: at each position the candidates by token id, the prompt's own token among them.

    rank: 1 for the most likely token; null for the prompt's own token where it is not among the num_top reported.
    """
    result: list[dict[str, Any] | None] = []
    for token_id, scored in zip(ids, positions, strict=True):
        if scored is None:
            result.append(None)
            continue
        top = scored.top[:num_top]
        ranked = [(candidate, logprob, rank) for rank, (candidate, logprob) in enumerate(top, start=1)]
        if token_id not in (candidate for candidate, _ in top):
            ranked.append((token_id, scored.logprob, None))  # type: ignore[arg-type]
        result.append(
            {
                str(candidate): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": names.of_token(candidate),
                }
                for candidate, logprob, rank in ranked
            }
        )
    return result
