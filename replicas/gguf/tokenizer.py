"""The tokenizer of a GGUF file as transformers' files: a text must have the ids that the model learnt for it.

transformers' own reader splits text like GPT-2 where it does not know `tokenizer.ggml.pre`, leaves out that whole
pieces go before merges, and takes control tokens with other characters than bytes have (DeepSeek's) for text. So a
byte-level tokenizer is built here; SentencePiece ones are transformers', with the settings that it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicas.gguf.file import GgufFile
from replicas.gguf.splitting import SPLITTINGS, Splitting
from replicas.model_support import UnsupportedModel

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4

_APPLIED = {
    *("model", "pre", "tokens", "token_type", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "eos_token_ids"),
}
# Nothing is ever padded here, and no text has an unknown byte.
_NO_MATTER = {"add_padding_token", "add_unknown_token"}
_MUST_BE_UNSET = {
    "add_sep_token": "a token between texts is not supported",
    "remove_extra_whitespaces": "text is not rid of spaces here",
    "precompiled_charsmap": "a map of characters is not supported",
    "normalizer.lowercase": "text is not made lower case here",
    "normalizer.strip_accents": "text is not rid of accents here",
    "suppress_tokens": "tokens that are never chosen are not supported",
}
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_FORMAL_ROLES = ("unk_token", "pad_token")
_ENDS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
# transformers reads every tokenizer of this architecture as Qwen2's, whatever the folder's files say.
_ONLY_QWEN2 = "qwen2"
_SENTENCEPIECE_ARCHITECTURES = ("llama", "phi3")
# Of Phi-3: control tokens that spaces and newlines after them do not belong to.
_KEEPING_SPACES = {"<unk>", "<s>", "<|endoftext|>"}


def check_tokenizer(file: GgufFile) -> None:
    """Raises UnsupportedModel for the first `tokenizer.ggml.*` that is neither applied nor without effect on ids."""
    keys = {key.removeprefix(_PREFIX) for key in {*file.metadata, *file.left_out} if key.startswith(_PREFIX)}
    if len(file.token_types) not in (0, len(file.tokens)):
        raise _refusal(file, "token_type", f"it has {len(file.token_types)} values for {len(file.tokens)} tokens")
    for key in (*_ROLES.values(), *_ENDS):
        _token_of(file, key)
    for key in sorted(keys - _APPLIED - _NO_MATTER):
        if key.endswith("_token_id"):
            continue
        if key not in _MUST_BE_UNSET:
            raise _refusal(file, key, "it is not known here, and may change the ids of a text")
        if _PREFIX + key in file.left_out or file.metadata[_PREFIX + key] not in (0, False, None, []):
            raise _refusal(file, key, _MUST_BE_UNSET[key])
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if not isinstance(_said(file, key, False), bool):
            raise _refusal(file, key, "true or false is needed")
    if file.metadata.get(f"{_PREFIX}model") == BYTE_LEVEL:
        if _splitting(file) != SPLITTINGS["qwen2"] and file.architecture == _ONLY_QWEN2:
            raise _refusal(file, "pre", f"for {_ONLY_QWEN2} only qwen2 and deepseek-r1-qwen are supported")
        if _said(file, "add_space_prefix", False):
            raise _refusal(file, "add_space_prefix", "a space before a text is only supported in SentencePiece")
    elif file.architecture not in _SENTENCEPIECE_ARCHITECTURES:
        raise _refusal(file, "model", f"for {file.architecture} only {BYTE_LEVEL!r} is supported")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """The tokenizer's files. Takes seconds for a big vocabulary.

    Raises UnsupportedModel for what `check_tokenizer` refuses, a vocabulary that is not whole, and a token that must
    begin or end each text and that the file does not name.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_tokenizer(file)
    if file.metadata.get(f"{_PREFIX}model") == BYTE_LEVEL:
        roles = {role: _token_of(file, key) for role, key in _ROLES.items() if _is_role(file, role)}
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=_byte_level(file, _splitting(file)),
            chat_template=file.metadata.get("tokenizer.chat_template"),
            **roles,
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        _set_spaces(tokenizer.backend_tokenizer, _said(file, "add_space_prefix", True))
        if file.architecture == "phi3":
            _strip_after_control(file, tokenizer)
    tokenizer.save_pretrained(folder)


def _splitting(file: GgufFile) -> Splitting:
    pre = file.metadata.get(f"{_PREFIX}pre")
    if isinstance(pre, str) and pre in SPLITTINGS:
        return SPLITTINGS[pre]
    if pre in (None, "default"):
        reason = (
            "how the model's text is split is not in the file, and any guess gives other ids than it learnt; "
            "gguf-new-metadata --pre-tokenizer NAME OLD NEW writes it"
        )
    else:
        reason = "how it splits text is not known here"
    raise _refusal(file, "pre", f"{reason}; known are {', '.join(sorted(SPLITTINGS))}")


def _byte_level(file: GgufFile, splitting: Splitting) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    added = _added_tokens(file)
    vocabulary = _vocabulary(file, added)
    merges = [_pair(merge) for merge in file.merges]
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise UnsupportedModel(f"{file.path}: {_PREFIX}merges has {left!r} and {right!r}: the vocabulary has not")
    backend: Any = Tokenizer(BPE(vocabulary, merges, ignore_merges=splitting.whole_pieces))
    if (normalizer := splitting.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    for token_id, is_special in sorted(added.items()):
        token = AddedToken(file.tokens[token_id], normalized=False, special=is_special)
        backend.add_special_tokens([token]) if is_special else backend.add_tokens([token])
    if around := _around(file, splitting):
        backend.post_processor = around
    return backend


def _added_tokens(file: GgufFile) -> dict[int, bool]:
    """Ids of the tokens that are looked for in a text before it is split, and whether each is a control token."""
    added = {
        token_id: kind == _CONTROL
        for token_id, kind in enumerate(file.token_types)
        if kind in (_CONTROL, _USER_DEFINED) and file.tokens[token_id]
    }
    for key in _ENDS:
        if (token_id := file.metadata.get(_PREFIX + key)) is not None:
            added[token_id] = True
    return added


def _vocabulary(file: GgufFile, added: Mapping[int, bool]) -> dict[str, int]:
    """Ids by token. An added one is its own text; any other is spelled in the characters that stand for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelling = bytes_to_unicode()
    alphabet = set(spelling.values())
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(file.tokens):
        is_spelled = token_id in added or alphabet.issuperset(token)
        text = token if is_spelled else "".join(spelling[byte] for byte in token.encode())
        if vocabulary.setdefault(text, token_id) != token_id:
            raise UnsupportedModel(f"{file.path}: {_PREFIX}tokens has {token!r} twice: {vocabulary[text]}, {token_id}")
    return vocabulary


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _around(file: GgufFile, splitting: Splitting) -> Any:
    """What puts tokens before and after each text; None if nothing does."""
    from tokenizers.processors import TemplateProcessing

    first = _token_around(file, "bos_token_id", "add_bos_token", splitting.adds_bos)
    last = _token_around(file, "eos_token_id", "add_eos_token", False)
    if not first and not last:
        return None
    ids = {file.tokens[token_id]: token_id for token_id in (*first, *last)}
    before, after = ([file.tokens[token_id] for token_id in side] for side in (first, last))
    single, other = [*before, "$A", *after], [*before, "$B", *after]
    return TemplateProcessing(
        single=single, pair=[*single, *(f"{part}:1" for part in other)], special_tokens=list(ids.items())
    )


def _token_around(file: GgufFile, role: str, key: str, is_default: bool) -> list[int]:
    """The token that each text begins or ends with; empty if none does."""
    if not _said(file, key, is_default):
        return []
    if _token_of(file, role) is None:
        raise _refusal(file, role, f"each text must have it by {_PREFIX}{key} or {_PREFIX}pre")
    return [file.metadata[_PREFIX + role]]


def _is_role(file: GgufFile, role: str) -> bool:
    """Files may name any token as padding, also an ordinary one: that must not be looked for in texts."""
    token_id = file.metadata.get(_PREFIX + _ROLES[role])
    return role not in _FORMAL_ROLES or (token_id is not None and file.token_types[token_id:][:1] == (_CONTROL,))


def _set_spaces(backend: Any, is_added: bool) -> None:
    """Of SentencePiece. is_added: whether a text gets a space in front, which transformers' reader takes for true."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    if backend.normalizer is None:
        # Anew in each case: the reader splits by a `tokenizer.ggml.pre` even here, where it has no meaning.
        scheme = "first" if is_added else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    else:  # Phi-3's
        backend.pre_tokenizer = None
        if not is_added:
            backend.normalizer = normalizers.Replace(" ", "▁")
    if not is_added:
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _strip_after_control(file: GgufFile, tokenizer: Any) -> None:
    """Phi-3's own files say it of each token; a GGUF has no place for it, and llama.cpp does it by the model's name."""
    from tokenizers import AddedToken

    names = [token for token, kind in zip(file.tokens, file.token_types, strict=False) if kind == _CONTROL]
    for name in names:
        if name not in _KEEPING_SPACES:
            stripping = AddedToken(name, rstrip=True, normalized=False, special=True)
            tokenizer.add_tokens([stripping], special_tokens=True)


def _said(file: GgufFile, key: str, default: bool) -> Any:
    return file.metadata.get(_PREFIX + key, default)


def _token_of(file: GgufFile, key: str) -> str | None:
    """The token whose id a setting is; None if there is no such setting."""
    token_id = file.metadata.get(_PREFIX + key)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(file.tokens):
        raise _refusal(file, key, f"the vocabulary has {len(file.tokens)} tokens")
    return file.tokens[token_id]


def _refusal(file: GgufFile, key: str, reason: str) -> UnsupportedModel:
    """For the caller to raise."""
    name = _PREFIX + key
    value = "a long array" if name in file.left_out else repr(file.metadata.get(name, "missing"))
    return UnsupportedModel(f"{file.path}: {name} is {value}: {reason}")
