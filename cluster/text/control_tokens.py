"""Control tokens, such as <|im_end|>: text of a message must never become one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from cluster.text.stand_ins import StandIns

# Private-use characters around a name that no client can guess. No template sees it.
_RENAMED = "\ue003{secret}\ue004{index}\ue002"

# Only an added token of this look is taken for a marker of the chat template: others are runs of spaces and words.
_MARKER = re.compile(r"[<\[|].*[>\]|]")
# Nearly all control tokens have some of these.
_BRACKETS = "<>[]|｜"


class ControlTokens:
    """The added tokens of a tokenizer that structure a prompt, and a tokenizer that text cannot forge them for.

    Two kinds: special tokens; and the others that the chat template names (DeepSeek's <｜User｜>, <think>), which a
    template may also look for in what the assistant said before.

    The guarded tokenizer (`guarded_backend`) knows the control tokens under secret names only. So the characters
    "<|im_end|>" are ordinary text to it, and a chat prompt is made in three steps: the template is shown messages with
    stand-ins for what could make a control token, puts in tokens of its own, and `disclose` turns these into secret
    names. The whole prompt is then encoded in one piece: ids are the same as without the guard.

    characters: all that control tokens have.
    """

    def __init__(self, spec: Mapping[str, Any], template: str) -> None:
        """spec: the content of a tokenizer.json. Changes nothing in it."""
        secret = secrets.randbits(64)
        tokens = [token for token in spec["added_tokens"] if token["special"] or _is_marker(token["content"], template)]
        special = [token["content"] for token in tokens if token["special"]]
        self.ids = {token["content"]: token["id"] for token in tokens}
        self.special_ids = frozenset(self.ids[content] for content in special)
        contents = list(self.ids)
        self.secret_names = {c: _RENAMED.format(secret=secret, index=i) for i, c in enumerate(contents)}
        self._unknown = _unknown_token(spec["model"])
        self.characters = "".join(sorted(set().union(*contents)))
        self._brackets = [bracket for bracket in _BRACKETS if bracket in self.characters]
        without = [content for content in contents if not set(_BRACKETS).intersection(content)]
        self._find_without = re.compile(_any_of(without)) if without else None
        self._find_special = re.compile(_any_of(special))
        self._find_any = re.compile(_any_of(contents))

    def hide_pieces(self, text: str, stand_ins: StandIns) -> str:
        """The text without what a control token can be made of, even from parts of it that a template puts together
        (tokens without brackets excepted: these are hidden where they stand).
        """
        if self._find_without is not None:
            text = stand_ins.hide_where(text, self._find_without)
        return stand_ins.hide(text, self._brackets)

    def hide_whole(self, text: str, stand_ins: StandIns) -> str:
        """The text without control tokens that stand in it."""
        return stand_ins.hide_where(text, self._find_any)

    def hide_special(self, text: str, stand_ins: StandIns) -> str:
        """The text without those that are special tokens."""
        return stand_ins.hide_where(text, self._find_special)

    def disclose(self, shown: str, plain: str) -> str:
        """The text to give to the guarded tokenizer: the plain one, with control tokens under their secret names where
        the shown one has them. Both are of the same length.
        """
        parts, end = [], 0
        for match in self._find_any.finditer(shown):
            parts += [plain[end : match.start()], self.secret_names[match[0]]]
            end = match.end()
        return "".join([*parts, plain[end:]])

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
