"""Loads a draft model for a served one, and refuses one whose token ids stand for other texts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from replicas.gguf.conversion import resolve_source
from replicas.hub_model import refuse_missing_path, refuse_unavailable
from replicas.model.identity_digests import tokenizer_digest
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model_support import UnsupportedModel, naming_failures
from replicas.settings import ModelSettings
from replicas.speculation.eagle3_files import read_eagle3
from replicas.speculation.eagle3_head import Eagle3Head, make_head

logger = logging.getLogger(__name__)

_KEY = "speculative.model"
_NAMED = 3


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """max_len: the longest sequence, in tokens, that it drafts for."""

    loaded: LoadedModel
    max_len: int


def load_draft(source: str, served_settings: ModelSettings, served: LoadedModel, device: torch.device) -> LoadedDraft:
    """The weights of `source`, a folder or Hub id, in the served model's number type, as they are in its files.

    Blocks for seconds to minutes. Raises UnsupportedModel, which names the key and the model: for files that are not
    there, for a tokenizer that is not the served model's, and as `load_model` does; HubRefusal.
    """
    _refuse_missing(source)
    folder = resolve_source(served_settings.source, served_settings.cache_dir)
    with _naming_key(source):
        refuse_other_tokenizer(source, folder, served_settings.trust_remote_code)
        max_len = min(served_settings.max_model_len, _num_positions(source, served_settings.trust_remote_code))
        settings = replace(served_settings, source=source, max_model_len=max_len, quantise="none")
        loaded = load_model(settings, device)
    if loaded.identity.tokenizer == "none" and loaded.vocab_size != served.vocab_size:
        raise UnsupportedModel(
            f"{_KEY}: {source} has {loaded.vocab_size} tokens, the served model {served.vocab_size}, and neither has a "
            "tokenizer that could tell what they stand for"
        )
    extra = {"event": "draft_loaded", "source": source, "identity": str(loaded.identity), "max_len": max_len}
    logger.info("draft model loaded", extra=extra)
    return LoadedDraft(loaded, max_len)


def load_head(source: str, served: LoadedModel, device: torch.device) -> Eagle3Head:
    """An EAGLE-3 head, a folder or Hub id, in the served model's number type, for the layer behind the model's in each
    block.

    Blocks. Raises UnsupportedModel, which names the key and the head, HubRefusal.
    """
    _refuse_missing(source)
    model: Any = served.model
    with _naming_key(source):
        with naming_failures(source, "reading it as an EAGLE-3 head"):
            files = read_eagle3(source, model.config)
            head = make_head(source, files, served.num_layers, model.get_input_embeddings(), served.dtype)
        if head.kv_shape != (served.num_kv_heads, served.head_dim):
            heads = " x ".join(map(str, head.kv_shape))
            raise UnsupportedModel(
                f"{source} has keys of {heads} (heads x dimension), the served model {served.num_kv_heads} x "
                f"{served.head_dim}: they do not fit into one block"
            )
    logger.info("EAGLE-3 head loaded", extra={"event": "head_loaded", "source": source})
    return head.to(device)


def _refuse_missing(source: str) -> None:
    """A folder may have gone since the config was checked. Raises UnsupportedModel, HubRefusal."""
    try:
        refuse_missing_path(source, _KEY)
    except FileNotFoundError as error:
        raise UnsupportedModel(str(error)) from error
    refuse_unavailable(source, _KEY)
    folder = Path(source)
    if folder.exists() and not folder.joinpath("config.json").is_file():
        raise UnsupportedModel(f"{_KEY}: {source} has no config.json any more; bring it back, or set another")


@contextmanager
def _naming_key(source: str) -> Iterator[None]:
    """What can't be read, or is refused, within is so by the name of the key."""
    try:
        yield
    except UnsupportedModel as error:
        text = str(error)
        raise UnsupportedModel(text if text.startswith(_KEY) else f"{_KEY}: {text}") from error
    except OSError as error:
        text = str(error).strip()
        cause = text.splitlines()[0] if text else type(error).__name__
        raise UnsupportedModel(f"{_KEY}: {source} can't be read: {cause}") from error


def refuse_other_tokenizer(source: str, served_folder: str, trust_remote_code: bool = False) -> None:
    """Raises UnsupportedModel unless both have the same tokens by the same ids, special ones included, or neither has a
    tokenizer. Equal files are not looked into; others are loaded, which takes seconds."""
    digests = tokenizer_digest(source), tokenizer_digest(served_folder)
    if digests[0] == digests[1]:
        return
    if "none" in digests:
        which = source if digests[0] == "none" else "the served model"
        raise UnsupportedModel(f"{_KEY}: {which} has no tokenizer; a draft model needs that of the served model")
    drafting, served = (_Tokens.of(of, trust_remote_code) for of in (source, served_folder))
    if unlike := drafting.unlike(served):
        raise UnsupportedModel(
            f"{_KEY}: {source} has another tokenizer than the served model: {unlike}; choose a draft model of the same "
            "family, or method: ngram"
        )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Ids by text, and ids of special tokens."""

    ids: dict[str, int]
    special: frozenset[int]

    @staticmethod
    def of(folder_or_hub_id: str, trust_remote_code: bool) -> _Tokens:
        with naming_failures(folder_or_hub_id, "reading its tokenizer"):
            loaded: Any = AutoTokenizer.from_pretrained(folder_or_hub_id, trust_remote_code=trust_remote_code)
        special = frozenset(id_ for id_, token in loaded.added_tokens_decoder.items() if token.special)
        return _Tokens(dict(loaded.get_vocab()), special)

    def unlike(self, served: _Tokens) -> str:
        """Where the two differ, in words; empty if nowhere."""
        texts = sorted(
            (text for text in self.ids.keys() | served.ids.keys() if self.ids.get(text) != served.ids.get(text)),
            key=lambda text: (min(self.ids.get(text, 1 << 40), served.ids.get(text, 1 << 40)), text),
        )
        if texts:
            named = [f"{text!r} is {_id(self.ids, text)} and not {_id(served.ids, text)}" for text in texts[:_NAMED]]
            return f"{', '.join(named)}{f' (and {len(texts) - _NAMED} more)' if len(texts) > _NAMED else ''}"
        if others := sorted(self.special ^ served.special):
            return f"tokens {', '.join(map(str, others[:_NAMED]))} are special in one of them only"
        return ""


def _id(ids: dict[str, int], text: str) -> str:
    return str(ids[text]) if text in ids else "no token"


def _num_positions(source: str, trust_remote_code: bool) -> int:
    with naming_failures(source, "reading its configuration"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    positions: int = config.get_text_config().max_position_embeddings
    return positions
