"""Whether a GGUF file holds the weights of a model: each of them, in its shape, and nothing else.

transformers' reader drops tensors that it has no name for, and makes up those that are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from replicas.gguf.config import applied_tensors, architecture_of
from replicas.gguf.file import GgufFile
from replicas.model_support import UnsupportedModel

_MAX_NAMED = 4


def check_tensors(file: GgufFile, config: Any) -> None:
    """Raise UnsupportedModel, naming tensors, unless the file's are those of the model that `config` describes."""
    expected = _expected_shapes(file, config)
    found = {name: shape for name, shape in file.shapes.items() if name not in applied_tensors(file)}
    missing = [name for name in expected if name not in found]
    if missing:
        raise UnsupportedModel(f"{file.path}: {_some(missing)} missing")
    unknown = [name for name in found if name not in expected]
    if unknown:
        raise UnsupportedModel(f"{file.path}: {_some(unknown)} not known here, and may change the text")
    for name, shape in expected.items():
        if found[name] != shape:
            raise file.tensor_refusal(name, f"by the metadata it must be {list(shape)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    kind = "the tensor" if len(names) == 1 else "the tensors"
    return f"{kind} {', '.join(names[:_MAX_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"


def _expected_shapes(file: GgufFile, config: Any) -> Mapping[str, tuple[int, ...]]:
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    expected = {}
    for name, weight in weights.items():
        stem, dot, ending = name.rpartition(".")
        for part, shape in _stored(stem if ending in ("weight", "bias") else name, tuple(weight.shape)):
            stored = names.get_name(part)
            if stored is None:
                raise UnsupportedModel(f"{file.path}: GGUF has no name for {name} of {file.architecture}")
            full = stored + (dot + ending if ending in ("weight", "bias") else ".weight")
            is_transposed = full.endswith(architecture_of(file).transposed)
            expected[full] = tuple(reversed(shape)) if is_transposed else shape
    return expected


def _stored(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names that the tensor map knows, and shapes, of what one weight of transformers is in a GGUF file."""
    if name.endswith(".experts.gate_up_proj"):
        experts = name.removesuffix("gate_up_proj")
        half = (shape[0], shape[1] // 2, shape[2])
        yield from ((f"{experts}gate_proj", half), (f"{experts}up_proj", half))
    elif name.endswith(".shared_expert_gate"):
        yield name, shape[1:]
    else:
        yield name, shape
