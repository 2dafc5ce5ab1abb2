"""The transformers config of a GGUF file: made of its settings, all of which must be understood.

transformers' own reader leaves out what it has no name for (RoPE scaling and factors, the RoPE base of some
architectures, a head's length) and keeps its defaults, ends of text included.
"""

from __future__ import annotations

from typing import Any

from replicas.gguf.architecture import GGUF_ARCHITECTURES, GgufArchitecture
from replicas.gguf.file import GgufFile
from replicas.gguf.rope import ROPE_SETTINGS, rope_parameters
from replicas.gguf.settings import check_settings
from replicas.gguf.tokenizer import BYTE_LEVEL, SENTENCEPIECE
from replicas.model_support import UnsupportedModel

_EMBEDDING = "token_embd.weight"
_TOKENIZER = "tokenizer.ggml.model"
_TOKENIZERS = (BYTE_LEVEL, SENTENCEPIECE)
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises UnsupportedModel for one that is not served."""
    architecture = GGUF_ARCHITECTURES.get(file.architecture)
    if architecture is None:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {file.architecture!r}; served from GGUF files are {known}"
        )
    return architecture


def model_config(file: GgufFile) -> Any:
    """A PretrainedConfig. Raises UnsupportedModel, naming the file, the setting and its value."""
    from transformers import AutoConfig

    architecture = architecture_of(file)
    settings = file.settings
    values: dict[str, Any] = {attribute: _number(file, key) for key, attribute in architecture.attributes.items()}
    head_dim = _head_dim(file)
    applied = {*architecture.attributes, "vocab_size"}
    if architecture.has_rope:
        applied |= ROPE_SETTINGS | {"attention.key_length"}
        _check_rotated(file, architecture, head_dim)
        values |= {"head_dim": head_dim, "rope_parameters": rope_parameters(file, head_dim)}
    check_settings(file, architecture, head_dim, applied)
    values |= architecture.constants
    values |= {trait: True for trait, tensor in architecture.traits.items() if tensor in file.shapes}
    values |= _vocabulary(file)
    values["tie_word_embeddings"] = "output.weight" not in file.shapes
    if settings.get("vocab_size", values["vocab_size"]) != values["vocab_size"]:
        raise file.refusal("vocab_size", f"{_EMBEDDING} has {values['vocab_size']} rows")
    return AutoConfig.for_model(architecture.model_type, dtype="float32", **values)


def applied_tensors(file: GgufFile) -> set[str]:
    """Tensors that the config says all of, so that no weight is made of them."""
    return set(architecture_of(file).rope_tensors) & file.shapes.keys()


def _number(file: GgufFile, key: str) -> float:
    value = file.settings.get(key)
    if isinstance(value, int | float) and value > 0:
        return value
    raise file.refusal(
        key, "a number for each layer is not supported" if isinstance(value, list) else "a number is needed"
    )


def _head_dim(file: GgufFile) -> int:
    width, num_heads = int(_number(file, "embedding_length")), int(_number(file, "attention.head_count"))
    if "attention.key_length" in file.settings:
        return int(_number(file, "attention.key_length"))
    if width % num_heads:
        raise file.refusal("attention.head_count", f"{file.architecture}.embedding_length is {width}")
    return width // num_heads


def _check_rotated(file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> None:
    key = "rope.dimension_count"
    rotated = file.settings.get(key, head_dim)
    if rotated == head_dim:
        return
    if not architecture.partial_rope:
        raise file.refusal(key, f"a head has {head_dim} dimensions, and all must be rotated")
    if not 0 < rotated < head_dim or rotated % 2:
        raise file.refusal(key, f"it must be even, and at most the dimensions of a head ({head_dim})")


def _vocabulary(file: GgufFile) -> dict[str, Any]:
    """Its size and what begins and ends a text: nothing where the file says nothing."""
    kind = file.metadata.get(_TOKENIZER)
    if kind not in _TOKENIZERS:
        raise UnsupportedModel(f"{file.path}: {_TOKENIZER} is {kind!r}; supported are {', '.join(_TOKENIZERS)}")
    if _EMBEDDING not in file.shapes:
        raise UnsupportedModel(f"{file.path}: the tensor {_EMBEDDING} is missing")
    if len(file.tokens) > file.shapes[_EMBEDDING][0]:
        raise file.tensor_refusal(_EMBEDDING, f"the vocabulary has {len(file.tokens)} tokens")
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", *_END_TOKENS)}
    further = file.metadata.get("tokenizer.ggml.eos_token_ids", [])  # in files that Ollama wrote
    named = [ids[name] for name in _END_TOKENS if ids[name] is not None]
    ends = list(dict.fromkeys([*named, *(further if isinstance(further, list) else [further])]))
    return {
        "vocab_size": file.shapes[_EMBEDDING][0],
        "bos_token_id": ids["bos_token_id"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
