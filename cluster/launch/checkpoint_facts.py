"""Gathers what a model on this machine is: from the headers of its files, in a second or two. No weight is read."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.config.model import ModelConfig, SourceKind
from cluster.launch.architecture import read_architecture
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts
from cluster.text.no_torch import no_torch
from replicas.gguf.config import architecture_of, model_config
from replicas.gguf.file import GgufFile, read_gguf
from replicas.model_support import UnsupportedModel, refuse_unsupported
from replicas.position_reach import step_dependent_reach
from replicas.quantisation.scheme import Scheme, WeightKind
from replicas.quantisation.scheme_reading import read_scheme

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
# As safetensors names them: of numbers as they are, and bytes of the others.
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_TYPE_BYTES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
_LONGEST_HEADER_BYTES = 100_000_000  # of safetensors itself


def checkpoint_facts(model: ModelConfig) -> ModelFacts:
    """Of a model on this machine. Raises UnsupportedModel for one that can't be served, or is not all there."""
    if model.kind is SourceKind.BUNDLED:
        return BUNDLED_FACTS.quantised(model.quantise)
    path = model.local_path()
    assert path is not None, "a model of the Hub has been found before"
    try:
        if model.kind is SourceKind.GGUF:
            return gguf_facts(read_gguf(path)).quantised(model.quantise)
        has_weights = model.load_format != "dummy"
        return folder_facts(path, model.trust_remote_code, model.quantise, has_weights=has_weights)
    except OSError as error:
        raise UnsupportedModel(f"{error.filename or path}: can't be read: {error.strerror}") from error


def gguf_facts(file: GgufFile) -> ModelFacts:
    """Raises UnsupportedModel as its conversion would, but for what only torch finds out."""
    architecture_of(file)
    num_weights = sum(math.prod(shape) for shape in file.shapes.values())
    try:
        with no_torch():
            config = model_config(file)
    except ImportError:
        # Of Llama 3.1 and later: how their positions are stretched is told from factors, which torch code computes.
        return _facts_of_settings(file, num_weights)
    refuse_unsupported(config)
    return _facts(config, num_weights)


def _facts_of_settings(file: GgufFile, num_weights: int) -> ModelFacts:
    def number(key: str, otherwise: int = 0) -> int:
        value = file.settings.get(key)
        return value if isinstance(value, int) and value > 0 else otherwise

    heads = number("attention.head_count", 1)
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    kv_numbers = number("block_count") * 2 * number("attention.head_count_kv", heads) * head_dim
    num_tables = 1 + ("output.weight" in file.shapes)  # else head and embeddings are one
    num_linear = num_weights - num_tables * len(file.tokens) * number("embedding_length")
    return ModelFacts(number("context_length") or None, num_weights, kv_numbers or None, num_linear=num_linear)


def folder_facts(folder: Path, trust_remote_code: bool, quantise: str = "none", has_weights: bool = True) -> ModelFacts:
    """has_weights: false where they are made up."""
    config = read_architecture(folder / "config.json", trust_remote_code, quantise)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UnsupportedModel(f"{folder} has no tokenizer (tokenizer.json); copy the model's tokenizer files there")
    counts = _counts(folder) if has_weights else None
    if config is None:
        return ModelFacts(num_weights=None if counts is None else counts.total())
    return _facts_of_counts(config, counts).quantised(quantise)


def config_facts(
    file: Path, trust_remote_code: bool, counts: Mapping[str, int] | None, quantise: str = "none"
) -> ModelFacts:
    """By a config.json alone, where the rest is still to be fetched. counts: numbers in its files, by their type.
    Raises UnsupportedModel.
    """
    config = read_architecture(file, trust_remote_code, quantise)
    counted = None if counts is None else Counter(counts)
    if config is None:
        return ModelFacts(num_weights=None if counted is None else counted.total())
    return _facts_of_counts(config, counted).quantised(quantise)


def _facts_of_counts(config: Any, counts: Counter[str] | None) -> ModelFacts:
    """counts: numbers by their type in the files. Of a quantised checkpoint, what is no plain number stays as it is."""
    scheme = read_scheme(config)
    if counts is None or scheme is None:
        return _facts(config, None if counts is None else counts.total())
    packed = {kind: number for kind, number in counts.items() if kind not in _PLAIN_TYPES}
    num_bytes = sum(number * _TYPE_BYTES.get(kind, 8) for kind, number in packed.items())
    num_bytes += _bytes_in_memory_alone(scheme, num_bytes)
    facts = _facts(config, counts.total())
    return replace(
        facts, num_linear=None, num_quantised=sum(packed.values()), quantised_bytes=num_bytes, scheme=scheme.describe()
    )


def _bytes_in_memory_alone(scheme: Scheme, num_bytes: int) -> int:
    """What comes to a file's bytes of weights in memory, as `replicas.layers.packed_weights` has them: scales of blocks
    are float32 of each output, and zero points a byte each, where files have half of one or none.
    """
    if scheme.group_size is None:
        return 0
    if scheme.kind is WeightKind.INT4:
        return 2 * num_bytes // scheme.group_size
    return 4 * num_bytes // scheme.group_size


def _facts(config: Any, num_weights: int | None) -> ModelFacts:
    return ModelFacts(
        max_positions=getattr(config, "max_position_embeddings", None),
        num_weights=num_weights,
        kv_numbers_per_token=_kv_numbers(config),
        step_reach=step_dependent_reach(config),
        num_linear=_num_linear(config, num_weights),
    )


def _num_linear(config: Any, num_weights: int | None) -> int | None:
    """All but embeddings and output head: norms and biases are too few to count."""
    sizes = [getattr(config, name, None) for name in ("vocab_size", "hidden_size")]
    if num_weights is None or not all(isinstance(size, int) for size in sizes):
        return None
    num_tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return max(0, num_weights - num_tables * int(math.prod(sizes)))  # type: ignore[arg-type]


def _kv_numbers(config: Any) -> int | None:
    """By the config, whose names differ: of real keys only a replica knows (replicas/model/attention_trace.py)."""
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None) or (width // heads if width and heads else None)
    if getattr(config, "multi_query", False):
        kv_heads = 1
    factors: list[Any] = [layers, 2, kv_heads, head_dim]
    return int(math.prod(factors)) if all(isinstance(factor, int) for factor in factors) else None


def _counts(folder: Path) -> Counter[str] | None:
    """Numbers of all tensors, by their type; None for files that do not say so in their header. Raises UnsupportedModel
    naming what is missing or not whole.
    """
    files = list(_weight_files(folder))
    if not files:
        raise UnsupportedModel(
            f"{folder} has no weights (model.safetensors, or shards with an index); is it all of the download? For "
            "random ones: --set model.load_format=dummy"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModel(f"{folder} lacks {missing[0]}{more}, which its index lists; download the rest")
    if any(file.suffix != ".safetensors" for file in files):
        return None
    return sum((safetensors_counts(file) for file in files), Counter[str]())


def _weight_files(folder: Path) -> Iterator[Path]:
    """As `replicas.model.checkpoint_files` has it, which needs torch, and is stricter."""
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            yield folder / name
            return
        if index.is_file():
            try:
                shards = set(json.loads(index.read_bytes())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UnsupportedModel(f"{index} is no index of a checkpoint's files: {error!r}") from error
            yield from (folder / shard for shard in sorted(shards))
            return


def safetensors_counts(file: Path) -> Counter[str]:
    """Numbers of each type, by the header of a safetensors file, which must be all there. Raises UnsupportedModel."""
    tensors = _safetensors_header(file)
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    size = file.stat().st_size
    if end > size:
        raise UnsupportedModel(f"{file} is not whole: {size} bytes of more than {end}; copy or download it again")
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor["dtype"]] += math.prod(tensor["shape"])
    return counts


def _safetensors_header(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER_BYTES, os.fstat(opened.fileno()).st_size):
                raise ValueError("its header is longer than the file")
            header = json.loads(opened.read(length))
        return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{file} is no whole safetensors file: {error}; copy or download it again") from error
