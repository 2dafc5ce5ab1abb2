"""Text to token ids and back, as the model expects it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from cluster.api_error import ApiError
from cluster.text.chat_template import ChatTemplate, TemplateOptions
from cluster.text.control_tokens import ControlTokens
from cluster.text.length import check_length
from cluster.text.token_bytes import token_bytes
from replicas.answer_ends import MODEL_FILE, answer_ends
from replicas.checkpoint_file import checkpoint_file

# Normalizers that keep every byte or replace it one for one; others (NFC, NFKC) shorten text, up to this factor.
_EXACT_NORMALIZERS = {"Prepend", "Replace"}
_NORMALIZER_SHRINK = 4

# A text with more characters than so many for each token it may have is tried out in pieces first.
_CHARS_PER_TOKEN = 6
_PIECE_CHARS = 16_384


class Tokenizer:
    """One model's tokenizer. Immutable after construction, so thread-safe.

    Encoding takes milliseconds per 1,000 tokens, and lets other threads run: long texts belong in a thread, never on
    the event loop. `too_long` costs nothing and refuses most of what could take seconds.

    vocab_size: ids below it are known to the tokenizer and (as far as config.json says) to the model.
    eos_token_ids: the ids that end an answer: those at which transformers' generate stops, and the tokenizer's own.
    That one too because it is the end by the chat template, and fine-tunes often leave the files of their base behind.
    bos_token_id: None if the model has none. special_ids: ids that leave no text.
    visible_bytes: the bytes of each other token. bytes_of_token: the bytes of every token.
    added_ids: tokens beside the vocabulary proper, by their text: the markers of a chat format are among them.
    template: the chat template's source, of several all in one; empty: there is none.
    response_template: how the checkpoint's makers have its answers taken apart, for transformers' ResponseParser.
    """

    def __init__(self, folder_or_hub_id: str, trust_remote_code: bool = False) -> None:
        """Reads files, perhaps from the Hub; takes seconds. A GGUF's are those of the folder it is converted into.

        Raises OSError when it finds no tokenizer, ValueError when it can't handle it faithfully.
        """
        # Imported here because it takes seconds, and because it loads torch where torch is installed.
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(folder_or_hub_id, trust_remote_code=trust_remote_code)
        if not loaded.is_fast:
            raise ValueError(f"{type(loaded).__name__} is not supported: it has no Rust implementation")
        spec = orjson.loads(loaded.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        template = _template(loaded)
        control_tokens = ControlTokens(spec, template or "")
        # Only asked to render from here on: its own encode() changes settings of the backend, which threads share.
        self._plain = loaded.backend_tokenizer
        self._plain.no_truncation()
        self._plain.no_padding()
        self._guarded = control_tokens.guarded_backend(spec)
        self._chat_template = ChatTemplate(loaded, template, control_tokens)
        self.template = template or ""
        self.response_template: Any = getattr(loaded, "response_template", None)
        self.added_ids: Mapping[str, int] = {token["content"]: token["id"] for token in spec["added_tokens"]}

        bytes_of_token = token_bytes(self._plain.get_vocab(with_added_tokens=True), spec["decoder"])
        self.bytes_of_token: Mapping[int, bytes] = bytes_of_token
        self.special_ids = control_tokens.special_ids
        self.visible_bytes: Mapping[int, bytes] = {
            token_id: text for token_id, text in bytes_of_token.items() if token_id not in self.special_ids
        }
        num_ids = max(bytes_of_token) + 1
        num_ids_of_model = _vocab_size(checkpoint_file(folder_or_hub_id, MODEL_FILE) or {}) or num_ids
        self.vocab_size = min(num_ids, num_ids_of_model)
        own_end = () if loaded.eos_token_id is None else (loaded.eos_token_id,)
        ends = (*answer_ends(folder_or_hub_id), *own_end)
        self.eos_token_ids = frozenset(id_ for id_ in ends if 0 <= id_ < num_ids_of_model)
        self.bos_token_id: int | None = loaded.bos_token_id
        longest = max(map(len, [*bytes_of_token.values(), *map(str.encode, control_tokens.secret_names.values())]))
        self._max_bytes_per_token = longest * _shrink_factor(spec["normalizer"])

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template tells the model of a request's tools."""
        return self._chat_template.shows_tools

    def to_json(self) -> str:
        """The text of a tokenizer.json that encodes and decodes likewise; some megabytes. Control tokens in a text
        count as such."""
        text: str = self._plain.to_str()
        return text

    def encode(self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put what the model wants around a text (for many a BOS in front).
        parse_special_tokens: whether "<|im_end|>" in the text is that control token, or those ten characters.
        """
        backend = self._plain if parse_special_tokens else self._guarded
        # The batch call lets other threads run meanwhile; encode() does not (tokenizers 0.23).
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_prompt(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        keep_last: int | None = None,
        max_chars: int | None = None,
    ) -> list[int]:
        """Ids of one prompt of /v1/completions: text, or ids that are only checked.

        Control tokens in the text count as such, as raw prompts are how a client uses a template of its own.
        keep_last: cut all but so many last ids off. Raises ApiError 400 if it is empty, has unknown ids or has more
        than max_tokens tokens; and for more than max_chars characters where they need not fit into max_tokens.
        """
        if not isinstance(prompt, str):
            ids = list(prompt)
        else:
            self._check_length(self._plain, prompt, None if keep_last else max_tokens, max_chars, "prompt")
            ids = self.encode(prompt, add_special_tokens=True, parse_special_tokens=True)
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt", code="empty_prompt")
        return self._accept(_last(ids, keep_last), max_tokens, "prompt")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        options: TemplateOptions | None = None,
        keep_last: int | None = None,
        max_chars: int | None = None,
    ) -> list[int]:
        """Ids of a chat prompt, up to where the assistant's answer begins. See ChatTemplate.render for messages.

        The same ids as transformers' apply_chat_template, except that text of a message never becomes a control token.
        Raises ApiError 400 if the template refuses the messages or they have more than max_tokens tokens; and for more
        than max_chars characters where they need not fit into max_tokens.
        """
        rendered = self._chat_template.render(messages, options)
        self._check_length(self._guarded, rendered, None if keep_last else max_tokens, max_chars, "messages")
        # The template has put in all the special tokens that it wants, BOS included.
        ids = _last(self.encode(rendered, add_special_tokens=False), keep_last)
        return self._accept(ids, max_tokens, "messages")

    def encode_prediction(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """The first ids of what an answer is expected to be, at most max_tokens: as a model writes a text, without
        control tokens, and up to one that the model does not have."""
        ids = self.encode(text, add_special_tokens=False)[:max_tokens]
        unknown = next((index for index, id_ in enumerate(ids) if id_ >= self.vocab_size), len(ids))
        return tuple(ids[:unknown])

    def bad_word_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write these words, each with and without a space in front; none twice.

        A model has usually one token for a word within a text and another for one that begins it. Control tokens in a
        word count as such. Sequences with tokens that the model can't choose are left out.
        """
        texts = [space + word.lstrip(" ") for word in words for space in ("", " ")]
        encoded = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        sequences = dict.fromkeys(tuple(encoding.ids) for encoding in encoded if encoding.ids)
        return tuple(ids for ids in sequences if max(ids) < self.vocab_size)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; bytes that are no UTF-8 become U+FFFD."""
        return self.bytes_of_token.get(token_id, b"").decode(errors="replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD; ids without a token are left out."""
        text: str = self._plain.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError 400 for an id outside of the vocabulary. Ids of any size are safe to ask about."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            message = f"{param} has a token id outside of the vocabulary: ids go from 0 to {self.vocab_size - 1}"
            raise ApiError(400, message, param=param, code="invalid_token_id")

    def too_long(self, text: str, max_tokens: int) -> bool:
        """True if the text certainly has more than max_tokens tokens, without encoding it; False says nothing.

        No token stands for more bytes than the longest one of the vocabulary. (Bytes that a vocabulary lacks have no
        tokens at all: a text of mostly those is called too long as well.)
        """
        max_bytes = max_tokens * self._max_bytes_per_token
        return len(text) > max_bytes or len(text.encode()) > max_bytes

    def _check_length(self, backend: Any, text: str, max_tokens: int | None, max_chars: int | None, param: str) -> None:
        """Raises ApiError 400 for most texts of more than twice max_tokens, without encoding all of them; without
        max_tokens, for those of more than max_chars.

        What is cut into pieces has more tokens than the whole, but by a few for each cut: pieces have hundreds.
        """
        if max_tokens is None:
            if max_chars is not None:
                check_length(len(text), max_chars, param)
            return
        if self.too_long(text, max_tokens):
            raise _too_many_tokens(None, max_tokens, param)
        if len(text) <= _CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            num_tokens += len(backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids)
            if num_tokens > 2 * max_tokens:
                raise _too_many_tokens(None, max_tokens, param)

    def _accept(self, ids: list[int], max_tokens: int | None, param: str) -> list[int]:
        if max_tokens is not None and len(ids) > max_tokens:
            raise _too_many_tokens(len(ids), max_tokens, param)
        # Text can have unknown ids too: some tokenizers have special tokens that the model has no weights for.
        self.check_ids(ids, param)
        return ids


def _template(loaded: Any) -> str | None:
    """A checkpoint may have one more for requests with tools, which transformers chooses by itself."""
    if not loaded.chat_template:
        return None
    sources = {loaded.get_chat_template(): None}
    if isinstance(loaded.chat_template, dict):
        sources[loaded.get_chat_template(tools=[{}])] = None
    return "\n".join(sources)


def _last(ids: list[int], count: int | None) -> list[int]:
    return ids if count is None else ids[-count:]


def _too_many_tokens(num_tokens: int | None, max_tokens: int, param: str) -> ApiError:
    length = f"the prompt has {num_tokens} tokens" if num_tokens is not None else "the prompt is far too long"
    message = f"{length}: at most {max_tokens} prompt tokens are possible here"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _shrink_factor(normalizer: dict[str, Any] | None) -> int:
    if normalizer is None:
        return 1
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    return 1 if {step["type"] for step in steps} <= _EXACT_NORMALIZERS else _NORMALIZER_SHRINK


def _vocab_size(model_config: Mapping[str, Any]) -> int | None:
    """How many tokens the model has weights for. Multimodal models say it in a part of their own."""
    size: int | None = model_config.get("vocab_size") or model_config.get("text_config", {}).get("vocab_size")
    return size
