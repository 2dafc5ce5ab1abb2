"""Control tokens, such as <|im_end|>: text of a message must never become one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

# Private-use characters around a name that no client can guess; no letters, which a template might change the case of.
_HIDDEN = "\ue000{nonce}\ue001{index}\ue002"
_RENAMED = "\ue003{nonce}\ue004{index}\ue002"

# Only an added token of this look is taken for a marker of the chat template: others are runs of spaces and words.
_MARKER = re.compile(r"[<\[|].*[>\]|]")


class ControlTokens:
    """The added tokens of a tokenizer that structure a prompt, and a tokenizer that text cannot forge them for.

    Two kinds: special tokens; and the others that the chat template names (DeepSeek's <｜User｜>, <think>), which a
    template may also look for in what the assistant said before.

    The guarded tokenizer (`guarded_spec`) knows the control tokens under secret names only. So the characters
    "<|im_end|>" are ordinary text to it, and a chat prompt is made in three steps: `hide` them in the messages, let
    the template put in its own, then `disclose` turns the template's into secret names and the messages' back into
    characters. The whole prompt is then encoded in one piece: ids are the same as without the guard.
    """

    def __init__(self, spec: Mapping[str, Any], template: str) -> None:
        """spec: the content of a tokenizer.json. Changes nothing in it."""
        nonce = str(secrets.randbits(64))
        tokens = [token for token in spec["added_tokens"] if token["special"] or _is_marker(token["content"], template)]
        special = [token["content"] for token in tokens if token["special"]]
        self.ids = {token["content"]: token["id"] for token in tokens}
        self.special_ids = frozenset(self.ids[content] for content in special)
        contents = list(self.ids)
        self.secret_names = {c: _RENAMED.format(nonce=nonce, index=i) for i, c in enumerate(contents)}
        self._hidden_names = {c: _HIDDEN.format(nonce=nonce, index=i) for i, c in enumerate(contents)}
        self._of_hidden_name = {name: content for content, name in self._hidden_names.items()}
        self._unknown = spec["model"].get("unk_token")
        self._nonce = nonce
        self._find_special = re.compile(_any_of(special))
        self._find_any = re.compile(_any_of(contents))
        self._find_hidden = re.compile(_any_of(list(self._of_hidden_name)))

    def hide(self, value: Any, special_only: bool) -> Any:
        """A copy of a string, or of lists and dicts of strings, with control tokens hidden."""
        if isinstance(value, str):
            find = self._find_special if special_only else self._find_any
            return find.sub(lambda match: self._hidden_names[match[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key, special_only): self.hide(item, special_only) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, special_only) for item in value]
        return value

    def disclose(self, rendered: str) -> str:
        """The text to give to the guarded tokenizer. Raises ValueError if the template took a hidden name apart."""
        text = self._find_any.sub(lambda match: self.secret_names[match[0]], rendered)
        text = self._find_hidden.sub(lambda match: self._of_hidden_name[match[0]], text)
        if f"\ue000{self._nonce}" in text or f"{self._nonce}\ue001" in text:
            raise ValueError("it cut through a control token in the text of a message")
        return text

    def guarded_spec(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a tokenizer.json in which every control token has its secret name, and the same id."""
        names = self.secret_names
        model = dict(spec["model"])
        if isinstance(model["vocab"], Mapping):
            model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
        else:  # Unigram: pairs of piece and score
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        added = [token | {"content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]]
        return {**spec, "model": model, "added_tokens": added}

    def check(self, guarded: Any) -> None:
        """Raises ValueError unless the guarded tokenizer knows every secret name and none of the real ones."""
        for content, token_id in self.ids.items():
            by_name, by_content = guarded.encode_batch_fast(
                [self.secret_names[content], content], add_special_tokens=False
            )
            if by_name.ids != [token_id]:
                raise ValueError(f"this tokenizer does not keep the special token {content!r} apart from text")
            # Characters that the vocabulary lacks become the unknown token; its own name may have some.
            if token_id in by_content.ids and content != self._unknown:
                raise ValueError(f"this tokenizer takes the text {content!r} for a special token")


def _is_marker(content: str, template: str) -> bool:
    return bool(_MARKER.fullmatch(content)) and content in template


def _any_of(words: list[str]) -> str:
    """A regular expression for any of the words, the longest where several fit, as the tokenizers do it.

    Shaped like a trie, since there may be hundreds of words, and Python tries plain alternatives one by one.
    """
    tails: dict[str, list[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    if not tails:
        return "" if words else r"(?!)"  # the end of a word; or no words at all: never matches
    branches = "|".join(re.escape(head) + _any_of(rest) for head, rest in tails.items())
    return f"(?:{branches})" + ("?" if "" in words else "")
