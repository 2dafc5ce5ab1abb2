"""Reads an EAGLE-3 head from its files, in the two forms that are published.

    EAGLE's own (`LlamaForCausalLMEagle3`)     layer `midlayer.*`; a flat config.json
    speculators (`Eagle3Speculator`)           layer `layers.0.*`; the layer's config in `transformer_layer_config`

Both have fc, norm, lm_head, and the maps d2t (of each draft id, how much larger the served model's is) and t2d. The
names are those of SafeAILab/EAGLE, sgl-project/SpecForge and vllm-project/speculators. EAGLE-3: Li et al. 2025.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from replicas.model.checkpoint import files_of
from replicas.model.checkpoint_files import weight_files
from replicas.model.checkpoint_mismatch import CheckpointMismatch, name_some
from replicas.model_support import UnsupportedModel

NUM_HIDDEN_STATES = 3
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_NAMES = (("midlayer.", "layer."), ("layers.0.", "layer."))
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # of training; t2d says no more than d2t
# Of a config what a head here does not do, and the value that asks for nothing.
_REFUSED = {"attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1, "sliding_window": None}
# Kinds of positions that do not depend on the longest one of a step.
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """layer: what the head's one layer is like. layer_ids: of the served model's layers those whose inputs it is given
    (0: the embeddings), rising. has_normed_residual: the layer adds to its input behind the norm, not before it.
    has_input_norm, has_state_norms: a norm in front of fc, of all hidden states as one vector, or of each.
    is_fed_normed: it is fed its own output behind the last norm, not before it.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    served_hidden_size: int
    layer_ids: tuple[int, ...]
    has_normed_residual: bool = False
    has_input_norm: bool = False
    has_state_norms: bool = False
    is_fed_normed: bool = False


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """tensors: by the head's own names (`Eagle3Head`). target_ids: int64 [draft_vocab_size], the served model's ids."""

    config: Eagle3Config
    tensors: Mapping[str, Tensor]
    target_ids: Tensor


def read_eagle3(source: str, served: PreTrainedConfig) -> Eagle3Files:
    """source: a folder, or the id of a model of the Hub that is in its cache. served: the config of the served model.

    Raises UnsupportedModel for what no head here is, and CheckpointMismatch, one of these, for tensors that its config
    does not explain.
    """
    folder = Path(source) if Path(source).is_dir() else files_of(source)
    try:
        said = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise UnsupportedModel(f"{source}: config.json is not valid JSON: {error}") from error
    config = eagle3_config(source, said, served)
    tensors = {_own_name(name): tensor for name, tensor in _tensors(folder).items() if name not in _IGNORED}
    target_ids = _target_ids(source, tensors.pop("d2t", None), config, served)
    return Eagle3Files(config, tensors, target_ids)


def eagle3_config(source: str, said: Mapping[str, Any], served: PreTrainedConfig) -> Eagle3Config:
    """Of a config.json in either form. Raises UnsupportedModel."""
    is_speculators = "speculators_model_type" in said
    if is_speculators:
        if (kind := said["speculators_model_type"]) != "eagle3":
            raise UnsupportedModel(f"{source} is a head of kind {kind!r}; eagle3 is served")
        of_layer = dict(said.get("transformer_layer_config") or {})
    else:
        if _ARCHITECTURE not in (said.get("architectures") or []):
            named = ", ".join(said.get("architectures") or []) or "nothing"
            raise UnsupportedModel(f"{source} is no EAGLE-3 head: its architectures name {named}, not {_ARCHITECTURE}")
        of_layer = dict(said)
    _refuse_layer(source, of_layer)
    of_layer.pop("architectures", None)
    layer = LlamaConfig(**of_layer)
    served_text = served.get_text_config()
    served_hidden_size = int(served_text.hidden_size)
    wanted = said.get("target_hidden_size") or layer.hidden_size
    if wanted != served_hidden_size:
        raise UnsupportedModel(
            f"{source} is another model's head: of hidden size {wanted}, the served one has {served_hidden_size}"
        )
    return Eagle3Config(
        layer,
        int(said.get("draft_vocab_size") or layer.vocab_size),
        served_hidden_size,
        _layer_ids(source, said, int(served_text.num_hidden_layers)),
        has_normed_residual=bool(said.get("norm_before_residual", False)),
        has_input_norm=bool(said.get("norm_before_fc", False)),
        has_state_norms=bool(said.get("fc_norm", False)),
        is_fed_normed=bool(said.get("norm_output", False)),
    )


def _refuse_layer(source: str, of_layer: Mapping[str, Any]) -> None:
    kind = of_layer.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise UnsupportedModel(f"{source}: a layer of kind {kind!r}; llama and qwen3 are served")
    if of_layer.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{source}: hidden_act {of_layer['hidden_act']!r}; silu is served")
    ropes = of_layer.get("rope_scaling") or of_layer.get("rope_parameters") or {}
    if (rope := ropes.get("rope_type", ropes.get("type", "default"))) not in _STATIC_ROPES:
        raise UnsupportedModel(f"{source}: positions of kind {rope!r}; {', '.join(_STATIC_ROPES)} are served")
    for key, harmless in _REFUSED.items():
        found = of_layer.get(key, harmless)
        if found != harmless and not (key == "sliding_window" and not of_layer.get("use_sliding_window", True)):
            raise UnsupportedModel(f"{source}: {key} {found!r}, which is not supported; {harmless!r} is")


def _layer_ids(source: str, said: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Speculators name layers by their inputs, SpecForge (in `eagle_config`) by their outputs; neither: EAGLE's own."""
    nested = (said.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids := said.get("eagle_aux_hidden_state_layer_ids"):
        found = tuple(int(id_) for id_ in ids)
    elif nested:
        found = tuple(int(id_) + 1 for id_ in nested)
    else:
        found = (2, num_layers // 2, num_layers - 3)
    if len(found) != NUM_HIDDEN_STATES or list(found) != sorted(found) or not 0 <= found[0] <= found[-1] <= num_layers:
        raise UnsupportedModel(
            f"{source}: hidden states in front of layers {found}, of {num_layers} in all; three rising ones are served"
        )
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        is_safe = file.suffix == ".safetensors"
        tensors |= load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def _own_name(name: str) -> str:
    for theirs, ours in _LAYER_NAMES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _target_ids(source: str, d2t: Tensor | None, config: Eagle3Config, served: PreTrainedConfig) -> Tensor:
    ids = torch.arange(config.draft_vocab_size)
    if d2t is not None:
        if d2t.shape != ids.shape:
            raise CheckpointMismatch(f"{source}: d2t is {list(d2t.shape)} instead of {list(ids.shape)}")
        ids = ids + d2t.long()
    vocab_size = int(served.get_text_config().vocab_size)
    if config.layer.vocab_size != vocab_size:
        raise UnsupportedModel(
            f"{source} is another model's head: of {config.layer.vocab_size} tokens, the served one has {vocab_size}"
        )
    if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointMismatch(
            f"{source}: {config.draft_vocab_size} draft tokens{'' if d2t is not None else ', without d2t,'} are not as "
            f"many tokens of the served model's {vocab_size}"
        )
    return ids


def refuse_unexplained(source: str, missing: list[str], unexpected: list[str]) -> None:
    """Raises CheckpointMismatch."""
    problems = [f"it lacks {name_some(missing)}"] if missing else []
    problems += [f"a head has no place for {name_some(unexpected)}"] if unexpected else []
    if problems:
        raise CheckpointMismatch(f"{source} does not fit its config.json: {'; '.join(problems)}")
