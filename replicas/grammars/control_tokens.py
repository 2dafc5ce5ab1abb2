"""Control tokens without their texts: what a grammar spells out is then never taken for one of them.

What compiles encodes a text that must come, to have its first token at once; and an encoder finds control tokens in any
text. Of a property that is called `<|im_end|>` the answer would end at its first letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from replicas.grammars.lark_pieces import LARK_PIECES

# A character that no text has, around the token's id.
_NO_CHARACTER = "\U0010ffff"


def control_ids(tokenizer_json: str) -> dict[str, int]:
    """Of the text of a tokenizer.json: its control tokens by their texts."""
    return {added["content"]: added["id"] for added in _added(json.loads(tokenizer_json)) if added["special"]}


def without_control_texts(tokenizer_json: str) -> str:
    """The same tokenizer, but that no text has its control tokens. For 128k tokens it takes half a second."""
    tokenizer = json.loads(tokenizer_json)
    names = {
        added["content"]: f"{_NO_CHARACTER}{added['id']}{_NO_CHARACTER}"
        for added in _added(tokenizer)
        if added["special"]
    }
    for added in _added(tokenizer):
        added["content"] = names.get(added["content"], added["content"])
    model = tokenizer["model"]
    model["vocab"] = _renamed(model["vocab"], names)
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    tokenizer["post_processor"] = None  # what it would put around a text is none of a grammar's
    return json.dumps(tokenizer)


def with_ids_of_controls(lark: str, ids: Mapping[str, int]) -> str:
    """A grammar in Lark whose control tokens are named by id, as they have no other name. Unknown ones stay."""

    def by_id(found: re.Match[str]) -> str:
        token_id = ids.get(found["token"]) if found["token"] else None
        return found[0] if token_id is None else f"<[{token_id}]>"

    return LARK_PIECES.sub(by_id, lark)


def _added(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return tokenizer.get("added_tokens") or []


def _renamed(vocab: Any, names: Mapping[str, str]) -> Any:
    """A vocabulary is a map to ids, or a list of texts with their scores."""
    if isinstance(vocab, dict):
        return {names.get(text, text): token_id for text, token_id in vocab.items()}
    return [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
