"""What drafts need: the small model, or the head, that `speculative.model` names. Asks the Hub where it is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.model import SourceKind, source_kind
from cluster.config.root import Config
from cluster.launch.checkpoint_facts import config_facts, count_numbers, folder_facts, kv_numbers_of
from cluster.launch.model_facts import DraftFacts
from cluster.user_error import ConfigError
from replicas.hub_model import HubModel, HubRefusal, HubUnreachable, copy_in_cache, find_on_hub
from replicas.model_support import UnsupportedModel

DRAFT_KEY = "speculative.model"


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """hub: where it is still to be fetched from. folder: a copy of a model of the Hub that can be used as it is."""

    facts: DraftFacts
    hub: HubModel | None = None
    folder: Path | None = None


def find_draft(config: Config) -> FoundDraft | None:
    """None where no model drafts. Takes 8 s at most. Raises ConfigError."""
    source = config.speculative.model
    if not config.speculative.drafts_by_model or source is None:
        return None
    try:
        if source_kind(source) is not SourceKind.HUB:
            return FoundDraft(_of_folder(Path(source), config))
        return _on_hub(source, config)
    except UnsupportedModel as refusal:
        raise ConfigError(f"{DRAFT_KEY}: {refusal}") from refusal
    except OSError as error:
        raise ConfigError(f"{DRAFT_KEY}: {error.filename or source}: can't be read: {error.strerror}") from error
    except HubRefusal as refusal:
        raise ConfigError(str(refusal)) from refusal


def _on_hub(source: str, config: Config) -> FoundDraft:
    try:
        found = find_on_hub(source, config.model.trust_remote_code, DRAFT_KEY)
    except HubUnreachable:
        copy = copy_in_cache(source)
        if copy is None:
            raise
        return FoundDraft(_of_folder(copy, config), folder=copy)
    if config.speculative.method == "eagle3":
        num_weights = None if found.counts is None else sum(found.counts.values())
        return FoundDraft(_of_head(found.config, num_weights), hub=found)
    facts = config_facts(found.config, config.model.trust_remote_code, found.counts)
    return FoundDraft(DraftFacts.of_model(facts), hub=found)


def _of_folder(folder: Path, config: Config) -> DraftFacts:
    """Raises UnsupportedModel, OSError."""
    has_weights = config.model.load_format != "dummy"
    if config.speculative.method == "eagle3":
        counts = count_numbers(folder)
        return _of_head(folder / "config.json", None if counts is None else counts.total())
    return DraftFacts.of_model(folder_facts(folder, config.model.trust_remote_code, has_weights=has_weights))


def _of_head(file: Path, num_weights: int | None) -> DraftFacts:
    """By its config.json: one layer, in either form that heads are published in."""
    try:
        said: Any = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}") from None
    if not isinstance(said, dict):
        raise UnsupportedModel(f"{file} is no JSON object")
    is_head = said.get("speculators_model_type") == "eagle3"
    if not is_head and "LlamaForCausalLMEagle3" not in (said.get("architectures") or []):
        raise UnsupportedModel(f"{file} is of no EAGLE-3 head; a small model is named with method: draft_model")
    layer = said.get("transformer_layer_config") if is_head else said
    return DraftFacts(num_weights, kv_numbers_of(_Said(layer if isinstance(layer, dict) else {})), is_head=True)


class _Said:
    """Keys of a config.json as attributes, of a model with one layer."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update({**values, "num_hidden_layers": 1})
