"""A prompt in front of its own answer, as `echo` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.scored_token import ScoredToken

if TYPE_CHECKING:
    from cluster.text.tokenizer import Tokenizer
    from replicas.messages import TokenLogprobs


class PromptEcho:
    """Immutable. text: the prompt as the model reads it, so the text of all its tokens.

    Special tokens are shown, but not one that the tokenizer put in front by itself.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: str | Sequence[int], ids: Sequence[int], keep_last: int | None = None
    ) -> None:
        """prompt: as the client gave it. ids: its tokens, of which only the keep_last last ones may be left."""
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        pieces = [detokenizer.push(token_id) for token_id in ids]
        pieces[-1] += detokenizer.finish()
        if isinstance(prompt, str) and ids[0] in tokenizer.special_ids and not prompt.startswith(pieces[0]):
            # In front of the whole prompt the tokenizer put it; in front of its end it is the client's own.
            is_whole = len(ids) != keep_last or len(tokenizer.encode_prompt(prompt)) == len(ids)
            if is_whole:
                pieces[0] = ""
        self._ids = ids
        self._pieces = pieces
        self.text = "".join(pieces)

    def tokens(self, positions: Sequence[TokenLogprobs | None]) -> tuple[ScoredToken, ...]:
        """Its tokens with what the model thought of them. positions: one for each."""
        tokens, offset = [], 0
        for token_id, piece, logprobs in zip(self._ids, self._pieces, positions, strict=True):
            tokens.append(ScoredToken(token_id, piece, offset, logprobs))
            offset += len(piece)
        return tuple(tokens)
