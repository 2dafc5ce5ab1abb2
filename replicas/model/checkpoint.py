"""Reads a checkpoint into the model that its config describes, and refuses one that does not fit it exactly.

transformers fills what a file lacks with random numbers and leaves out what it does not know, with a warning: either
would be served as fluent wrong text, and by two replicas as two different ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file

from replicas.model.checkpoint_files import number_types, weight_files
from replicas.model.checkpoint_mismatch import CheckpointMismatch, name_some
from replicas.model.kv_scales import KV_SCALE_NAME, read_kv_scales

_SUFFIXES = (".safetensors", ".bin", ".json", ".py")
_NUMBER_TYPES = ("F64", "F32", "F16", "BF16")
# What models once kept in their files and make anew now, beside what transformers knows of that kind.
_MADE_ANEW = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.masked_bias$")
_KV_SCALE = re.sub(r"\?P<\w+>", "?:", KV_SCALE_NAME.pattern)  # other patterns may name their groups alike


def read_checkpoint(
    folder: str, config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    """The model with its weights, on the device from the start: nothing is made, or kept, in host memory for a GPU.

    folder: of config.json and weights, or a Hub id. Blocks for seconds to minutes. Raises CheckpointMismatch naming
    keys, OSError for files that are missing or unreadable.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            device_map=None if device.type == "cpu" else device,
            ignore_mismatched_sizes=True,  # it would raise, and name the first one only
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise CheckpointMismatch(
            f"a *.safetensors file of {folder} is not whole: {error}; was it copied or downloaded to its end?"
        ) from error
    is_made_anew = made_anew(model)
    _refuse_mismatch(report, is_made_anew)
    files = weight_files(files_of(folder), getattr(config, "transformers_weights", None))
    _refuse_number_types(number_types(files), model, is_made_anew)
    refuse_untied(model)
    if device.type == "cpu":
        _own_memory(model)
    loaded: nn.Module = model
    return loaded


def checkpoint_kv_scales(folder: str, config: Any, *, are_all_there: bool = False) -> tuple[tuple[float, float], ...]:
    """Of a folder or Hub id whose weights were read: as `read_kv_scales`."""
    named = getattr(config, "transformers_weights", None)
    return read_kv_scales(files_of(folder), config.num_hidden_layers, named, are_all_there=are_all_there)


def random_model(config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """Random weights of the right shapes, the same in every replica."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model


@dataclass(frozen=True, slots=True)
class FilesAsRead:
    """A model's files as they were before they were read. Of a Hub id none: a snapshot does not change."""

    folder: str
    marks: tuple[tuple[str, int, int, int, int], ...]  # name, inode, bytes, times of writing and of any change

    @staticmethod
    def now(folder: str) -> FilesAsRead:
        files = {*Path(folder).iterdir(), *weight_files(Path(folder))} if Path(folder).is_dir() else set()
        stats = [(file.name, file.stat()) for file in sorted(files) if file.suffix in _SUFFIXES and file.is_file()]
        marks = tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)
        return FilesAsRead(folder, marks)

    def refuse_change(self) -> None:
        """Raises CheckpointMismatch naming files that were replaced or written meanwhile: half of each was read."""
        now = FilesAsRead.now(self.folder)
        if now != self:
            names = sorted({mark[0] for mark in set(now.marks) ^ set(self.marks)})
            raise CheckpointMismatch(
                f"{name_some(names)} in {self.folder} changed while it was read; start again when all of it is there"
            )


def made_anew(model: Any) -> re.Pattern[str]:
    """Names of tensors in a file that count for nothing here: masks and tables, of whatever type; scales of KV, which
    `read_kv_scales` reads."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return re.compile("|".join([*_MADE_ANEW, _KV_SCALE, *ignored]))


def _refuse_number_types(kinds: dict[str, str], model: nn.Module, is_made_anew: re.Pattern[str]) -> None:
    """transformers makes floats of integers and of 8-bit floats as they are, whatever scale they were meant with."""
    whole = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}  # as are meant
    others = [
        f"{name} ({kind})"
        for name, kind in kinds.items()
        if kind not in _NUMBER_TYPES and name not in whole and not is_made_anew.search(name)
    ]
    if others:
        raise CheckpointMismatch(f"weights stored quantised, without a config that says how: {name_some(others)}")


def _refuse_mismatch(report: dict[str, Any], is_made_anew: re.Pattern[str]) -> None:
    problems = []
    if missing := _names(report["missing_keys"]):
        problems.append(f"it lacks {name_some(missing)}")
    if unexpected := [name for name in _names(report["unexpected_keys"]) if not is_made_anew.search(name)]:
        problems.append(f"the model has no place for {name_some(unexpected)}")
    if mismatched := sorted(report["mismatched_keys"], key=str):
        shapes = [f"{name} ({list(found)} instead of {list(wanted)})" for name, found, wanted in mismatched]
        problems.append(f"of another shape: {name_some(shapes)}")
    if errors := report.get("error_msgs"):
        problems.append(name_some([str(error) for error in errors]))
    if problems:
        raise CheckpointMismatch(f"the checkpoint does not fit its config.json: {'; '.join(problems)}")


def files_of(folder_or_hub_id: str) -> Path:
    """Where its files lie; of a Hub id after they were fetched."""
    if Path(folder_or_hub_id).is_dir():
        return Path(folder_or_hub_id)
    found = cached_file(folder_or_hub_id, "config.json")
    assert found is not None, "its config was read from there"
    return Path(found).parent


def refuse_untied(model: Any) -> None:
    """A config that ties two weights which the checkpoint has, unlike each other: transformers takes the checkpoint's
    word, older versions and other programs the config's. One of the two is a mistake."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    if head.weight.data_ptr() != embeddings.weight.data_ptr():
        raise CheckpointMismatch(
            "config.json has tie_word_embeddings: true, but the checkpoint has an output head that is unlike its "
            "embeddings; say tie_word_embeddings: false if it is meant"
        )


def _own_memory(model: nn.Module) -> None:
    """Copy what is mapped from a file: else writing to that file would change the weights of a running replica."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.clone()


def _names(keys: Collection[Any]) -> list[str]:
    return sorted(str(key) for key in keys)
