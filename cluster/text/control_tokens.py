"""Control tokens, such as <|im_end|>: text of a message must never become one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

import orjson

# Private-use characters around a name that no client can guess; no letters, which a template might change the case of.
_HIDDEN = "\ue000{secret}\ue001{index}\ue002"
_RENAMED = "\ue003{secret}\ue004{index}\ue002"

# Only an added token of this look is taken for a marker of the chat template: others are runs of spaces and words.
_MARKER = re.compile(r"[<\[|].*[>\]|]")


class ControlTokens:
    """The added tokens of a tokenizer that structure a prompt, and a tokenizer that text cannot forge them for.

    Two kinds: special tokens; and the others that the chat template names (DeepSeek's <｜User｜>, <think>), which a
    template may also look for in what the assistant said before.

    The guarded tokenizer (`guarded_backend`) knows the control tokens under secret names only. So the characters
    "<|im_end|>" are ordinary text to it, and a chat prompt is made in three steps: `hide` them in the messages, let
    the template put in its own, then `disclose` turns the template's into secret names and the messages' back into
    characters. The whole prompt is then encoded in one piece: ids are the same as without the guard.
    """

    def __init__(self, spec: Mapping[str, Any], template: str) -> None:
        """spec: the content of a tokenizer.json. Changes nothing in it."""
        secret, self._hiding_secret = _secret(), _secret()
        tokens = [token for token in spec["added_tokens"] if token["special"] or _is_marker(token["content"], template)]
        special = [token["content"] for token in tokens if token["special"]]
        self.ids = {token["content"]: token["id"] for token in tokens}
        self.special_ids = frozenset(self.ids[content] for content in special)
        contents = list(self.ids)
        self.secret_names = {c: _RENAMED.format(secret=secret, index=i) for i, c in enumerate(contents)}
        self._hidden_names = {c: _HIDDEN.format(secret=self._hiding_secret, index=i) for i, c in enumerate(contents)}
        self._of_hidden_name = {name: content for content, name in self._hidden_names.items()}
        self._unknown = _unknown_token(spec["model"])
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
        if self._hiding_secret in text:
            raise ValueError("it cut through a control token in the text of a message")
        return text

    def guarded_backend(self, spec: Mapping[str, Any]) -> Any:
        """A tokenizers.Tokenizer like that of the spec, but with every control token under its secret name.

        Raises ValueError, naming it, for a control token that can't be told from ordinary text.
        """
        from tokenizers import Tokenizer as Backend

        try:
            guarded = Backend.from_buffer(orjson.dumps(self._renamed(spec)))
        except Exception as error:  # tokenizers raises nothing more special
            raise ValueError(f"a special token of this tokenizer is an ordinary word too: {error}") from error
        for content, token_id in self.ids.items():
            texts = [self.secret_names[content], content]
            by_name, by_content = guarded.encode_batch_fast(texts, add_special_tokens=False)
            # Characters that the vocabulary lacks become the unknown token; its own name may have some.
            is_text = by_content.ids and (token_id not in by_content.ids or content == self._unknown)
            if by_name.ids != [token_id] or not is_text:
                raise ValueError(f"this tokenizer can't tell its special token {content!r} from text")
        return guarded

    def _renamed(self, spec: Mapping[str, Any]) -> dict[str, Any]:
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


def _secret() -> str:
    return str(secrets.randbits(64))


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    name: str | None = model.get("unk_token")
    if model.get("unk_id") is not None:  # Unigram
        name = model["vocab"][model["unk_id"]][0]
    return name


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
