"""What a draft model or a head is, and whether it can draft for the served model: from the headers of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.model import ModelConfig, SourceKind, source_kind
from cluster.config.speculative import SpeculativeConfig
from cluster.launch.checkpoint_facts import config_facts, folder_facts, safetensors_counts
from cluster.launch.model_facts import ModelFacts
from cluster.user_error import ConfigError
from replicas.gguf.file import read_gguf
from replicas.hub_model import HubModel, HubRefusal, HubUnreachable, copy_in_cache, find_on_hub
from replicas.model_support import UnsupportedModel

_KEY = "speculative.model"
_HEADS = "LlamaForCausalLMEagle3"
_NAMED = 3


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """facts: of a model, or of a head, whose KV is one more layer of each block. unlike: where its tokens are other
    than the served model's; empty: nowhere, or not known here. hub: where it is still to be fetched from.
    """

    facts: ModelFacts
    unlike: str = ""
    hub: HubModel | None = None


def draft_facts(speculative: SpeculativeConfig, served: ModelConfig) -> DraftFacts | None:
    """None where no model drafts. Raises ConfigError."""
    source = speculative.model
    if source is None:
        return None
    try:
        folder = Path(source) if source_kind(source) is SourceKind.FOLDER else None
        hub = None
        if folder is None:
            try:
                hub = find_on_hub(source, served.trust_remote_code, _KEY)
            except HubUnreachable:
                folder = copy_in_cache(source)
                if folder is None:
                    raise
        if speculative.method == "eagle3":
            return DraftFacts(_head_facts(hub.config.parent if hub else _folder(folder)), hub=hub)
        if hub is not None:
            return DraftFacts(config_facts(hub.config, served.trust_remote_code, hub.counts), hub=hub)
        return DraftFacts(folder_facts(_folder(folder), served.trust_remote_code), _unlike(_folder(folder), served))
    except HubRefusal as refusal:
        raise ConfigError(str(refusal)) from refusal
    except UnsupportedModel as refusal:
        raise ConfigError(f"{_KEY}: {refusal}") from refusal
    except OSError as error:
        raise ConfigError(f"{_KEY}: {error.filename or source}: can't be read: {error.strerror}") from error


def _folder(folder: Path | None) -> Path:
    assert folder is not None, "it is here, or on the Hub"
    return folder


def _head_facts(folder: Path) -> ModelFacts:
    """Of an EAGLE-3 head, in either form that is published. Raises UnsupportedModel."""
    file = folder / "config.json"
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}") from None
    is_head = isinstance(said, dict) and (
        _HEADS in (said.get("architectures") or ()) or said.get("speculators_model_type") == "eagle3"
    )
    if not is_head:
        raise UnsupportedModel(f"{folder} is no EAGLE-3 head ({_HEADS}, or of speculators); for a model: draft_model")
    layer: dict[str, Any] = said.get("transformer_layer_config") or said
    heads, width = layer.get("num_attention_heads"), layer.get("hidden_size")
    kv_heads = layer.get("num_key_value_heads") or heads
    head_dim = layer.get("head_dim") or (width // heads if isinstance(width, int) and isinstance(heads, int) else None)
    numbers = 2 * kv_heads * head_dim if isinstance(kv_heads, int) and isinstance(head_dim, int) else None
    weights = folder / "model.safetensors"
    counts = safetensors_counts(weights) if weights.is_file() else None
    num_weights = counts.total() if counts is not None else None
    return ModelFacts(num_weights=num_weights, kv_numbers_per_token=numbers)


def _unlike(folder: Path, served: ModelConfig) -> str:
    path = served.local_path()
    if path is None or (ours := _vocabulary(folder)) is None:
        return ""
    if path.suffix == ".gguf":
        # It names fillers of its table, too, which no tokenizer.json has.
        theirs = {text: id_ for id_, text in enumerate(read_gguf(path).tokens) if text in ours}
        ours = {text: ours[text] for text in theirs}
    elif (found := _vocabulary(path)) is not None:
        theirs = found
    else:
        return ""
    texts = [text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text)]
    texts.sort(key=lambda text: (min(ours.get(text, 1 << 40), theirs.get(text, 1 << 40)), text))
    named = ", ".join(f"{text!r} is {_id(ours, text)} and not {_id(theirs, text)}" for text in texts[:_NAMED])
    return named + (f" (and {len(texts) - _NAMED} more)" if len(texts) > _NAMED else "")


def _id(vocabulary: dict[str, int], text: str) -> str:
    return str(vocabulary[text]) if text in vocabulary else "no token"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Ids by text, by a tokenizer.json; None without one that says it plainly: a replica looks closer."""
    try:
        said = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = said["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            return None
        return vocabulary | {token["content"]: token["id"] for token in said.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
