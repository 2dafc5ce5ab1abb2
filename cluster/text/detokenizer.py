"""Token ids to text that grows token by token."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Grows the text of one choice. Not thread-safe; one per choice. Constant work per token.

    The text is the UTF-8 decoding of the generated tokens' bytes, special tokens left out (by default): what
    `Tokenizer.decode(ids)` returns, given piece by piece and never with half a character. It differs from that where
    a decoded string as a whole has no piecewise meaning, in tokenizers of the SentencePiece kind:
    - the space that opens the first token stays (decode drops it, as if a text began there; here one goes on);
    - a byte that is no UTF-8 becomes one U+FFFD by itself (decode turns the whole run of byte tokens around it into
      U+FFFD, also characters that were complete long before).

    It starts empty: the prompt is no part of it. When a prompt ends in the middle of a character, the rest of that
    character's bytes are no character by themselves and come out as U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: Mapping[int, bytes] | None = None
    ) -> None:
        """shown: special tokens that are not skipped."""
        self._visible_bytes = tokenizer.visible_bytes if skip_special_tokens else tokenizer.bytes_of_token
        self._shown = shown or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token made certain; often empty. Ids that the tokenizer does not know give no text."""
        text = self._visible_bytes.get(token_id)
        return self._utf8.decode(self._shown.get(token_id, b"") if text is None else text)

    def finish(self) -> str:
        """The rest: one U+FFFD if the text ends within a character. Ready for another text afterwards."""
        return self._utf8.decode(b"", final=True)
