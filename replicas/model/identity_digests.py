"""Digests of what two replicas must have in common (`replicas.model_identity`), of configs and files. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 6

# What decides which text a token id stands for. Of tokenizer_config.json all but the chat template, which only the
# ingress goes by.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def config_text(config: Any) -> str:
    """Of a PretrainedConfig: all that it says but names, versions and what an engine sets itself."""
    described = {k: v for k, v in config.to_dict().items() if k not in _CONFIG_NOISE and not k.startswith("_attn")}
    return json.dumps(described, sort_keys=True, default=str)


def config_digest(text: str, code: bytes) -> str:
    """Of what `config_text` says, and of the model's own code if it brings some."""
    return _digest(text.encode() + code)


def tokenizer_digest(folder_or_hub_id: str) -> str:
    """Of the files that say which text a token id stands for; "none" where there are none. Reads files, perhaps from
    the Hub. Raises OSError; ValueError for a tokenizer_config.json that is no JSON object."""
    contents = [(name, content) for name in _VOCABULARY_FILES if (content := _content(folder_or_hub_id, name))]
    if content := _content(folder_or_hub_id, _TOKENIZER_CONFIG):
        contents.append((_TOKENIZER_CONFIG, _without_template(content)))
    if not contents:
        return "none"
    return _digest(b"".join(name.encode() + hashlib.sha256(content).digest() for name, content in contents))


def _without_template(content: bytes) -> bytes:
    try:
        said = {k: v for k, v in json.loads(content).items() if k not in ("chat_template", "name_or_path")}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{_TOKENIZER_CONFIG} of the model is no JSON object: {error}") from error
    return json.dumps(said, sort_keys=True).encode()


def _content(folder_or_hub_id: str, name: str) -> bytes:
    """Of one file; empty if there is none."""
    if Path(folder_or_hub_id).is_dir():
        path = Path(folder_or_hub_id) / name
        return path.read_bytes() if path.is_file() else b""
    from transformers.utils.hub import cached_file

    found = cached_file(folder_or_hub_id, name, _raise_exceptions_for_missing_entries=False)
    return Path(found).read_bytes() if found else b""


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
