"""A quantised linear layer as its file has it, made `PackedWeights`: which tensors, and what is where in them.

Words of 32 bits hold eight numbers of 4 bits, the first in the lowest bits. What the eight are differs:

    compressed-tensors   inputs next to each other
    GPTQ                 inputs next to each other, the matrix transposed; zero points: outputs; v1 less one
    AWQ                  outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, the matrix transposed; zero points likewise
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from replicas.layers.packed_weights import FP8, PACKED_INPUTS, PackedWeights, pack_int4
from replicas.model.checkpoint_mismatch import CheckpointMismatch
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind

_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_WORD = 8  # numbers of 4 bits
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer's tensors in a file. name: of the layer. has: which names there are behind it. read: one by its name,
    on the device where it is to be.
    """

    name: str
    num_outputs: int
    num_inputs: int
    has: Collection[str]
    read: Callable[[str], torch.Tensor]

    def tensor(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """Raises CheckpointMismatch unless it is there, with this shape and one of these types."""
        if name not in self.has:
            raise CheckpointMismatch(f"the checkpoint is not quantised as its config.json says: no {self.name}.{name}")
        found = self.read(name)
        if tuple(found.shape) != shape or found.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointMismatch(
                f"{self.name}.{name} is {str(found.dtype).removeprefix('torch.')}{list(found.shape)} instead of "
                f"{wanted}{list(shape)}"
            )
        return found

    def only(self, *names: str) -> str:
        """The one of these names that is there; the first if none is. Raises CheckpointMismatch for several."""
        there = [name for name in names if name in self.has]
        if len(there) > 1:
            raise CheckpointMismatch(f"{self.name} has both {' and '.join(there)}; one of them is a leftover")
        return there[0] if there else names[0]


def stored_names(scheme: Scheme) -> frozenset[str]:
    """Names of all tensors that a quantised layer may have but its bias, behind the layer's own."""
    if scheme.dialect in (Dialect.GPTQ, Dialect.GPTQ_V2):
        return frozenset({"qweight", "qzeros", "scales", "g_idx"})
    if scheme.dialect is Dialect.AWQ:
        return frozenset({"qweight", "qzeros", "scales"})
    if scheme.kind is WeightKind.INT4:
        return frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})
    names = {"weight", "weight_scale"}
    if scheme.dialect is Dialect.FP8:
        names.add("weight_scale_inv")
    if scheme.activations is Activations.STATIC:
        names |= {"input_scale"} if scheme.dialect is not Dialect.FP8 else {"input_scale", "activation_scale"}
    return frozenset(names)


def packed_weights(layer: StoredLayer, scheme: Scheme) -> PackedWeights:
    """Of a scheme of any dialect that files have. Raises CheckpointMismatch naming the tensor that does not fit."""
    if scheme.kind is not WeightKind.INT4:
        return _of_8_bits(layer, scheme)
    if layer.num_inputs % PACKED_INPUTS or layer.num_outputs % _IN_WORD:
        raise CheckpointMismatch(
            f"{layer.name} is {layer.num_outputs} x {layer.num_inputs}: 4-bit weights of multiples of {_IN_WORD} "
            f"outputs and of {PACKED_INPUTS} inputs are served"
        )
    if scheme.dialect is Dialect.COMPRESSED_TENSORS:
        return _of_packed_inputs(layer, scheme)
    return _of_awq(layer, scheme) if scheme.dialect is Dialect.AWQ else _of_gptq(layer, scheme)


def _of_8_bits(layer: StoredLayer, scheme: Scheme) -> PackedWeights:
    shape = (layer.num_outputs, layer.num_inputs)
    values = layer.tensor("weight", shape, FP8 if scheme.kind is WeightKind.FP8 else torch.int8)
    scales, group_size = _scales_of_8_bits(layer, scheme)
    packed = PackedWeights(values.contiguous(), scales.contiguous(), group_size)
    if scheme.activations is not Activations.STATIC:
        return packed
    name = layer.only("input_scale", "activation_scale")
    return replace(packed, input_scale=_single(layer, name))


def _scales_of_8_bits(layer: StoredLayer, scheme: Scheme) -> tuple[torch.Tensor, int]:
    """float32, each output's own, and the inputs that share one."""
    name = layer.only("weight_scale", "weight_scale_inv") if scheme.dialect is Dialect.FP8 else "weight_scale"
    if scheme.granularity is Granularity.TENSOR:
        return _single(layer, name).view(1, 1).expand(layer.num_outputs, 1), layer.num_inputs
    if scheme.granularity is Granularity.CHANNEL:
        return layer.tensor(name, (layer.num_outputs, 1), *_SCALE_TYPES).float(), layer.num_inputs
    rows, columns = scheme.block_rows, scheme.group_size
    assert columns is not None, "a block has a size"
    blocks = (-(-layer.num_outputs // rows), -(-layer.num_inputs // columns))
    scales = layer.tensor(name, blocks, *_SCALE_TYPES).float()
    return scales.repeat_interleave(rows, dim=0)[: layer.num_outputs], columns


def _single(layer: StoredLayer, name: str) -> torch.Tensor:
    """float32 [1]; in files one number, or one in brackets."""
    shape = (1,)
    if name in layer.has and layer.read(name).dim() == 0:
        shape = ()  # type: ignore[assignment]
    return layer.tensor(name, shape, *_SCALE_TYPES).float().view(1)


def _of_packed_inputs(layer: StoredLayer, scheme: Scheme) -> PackedWeights:
    rows, columns = layer.num_outputs, layer.num_inputs
    if "weight_shape" in layer.has:
        said = layer.read("weight_shape").tolist()
        if said != [rows, columns]:
            raise CheckpointMismatch(f"{layer.name}.weight_shape says {said} instead of {[rows, columns]}")
    size, num_groups = _groups(layer, scheme)
    values = nibbles(layer.tensor("weight_packed", (rows, columns // _IN_WORD), torch.int32))
    scales = layer.tensor("weight_scale", (rows, num_groups), *_SCALE_TYPES)
    if scheme.is_symmetric:
        zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    else:
        words = layer.tensor("weight_zero_point", (rows // _IN_WORD, num_groups), torch.int32)
        zeros = nibbles(words.t()).t()
    order = _order(layer, "weight_g_idx", size) if scheme.is_ordered else None
    return _packed(values, scales, zeros, size, order)


def _of_gptq(layer: StoredLayer, scheme: Scheme) -> PackedWeights:
    size, num_groups = _groups(layer, scheme)
    words = layer.tensor("qweight", (layer.num_inputs // _IN_WORD, layer.num_outputs), torch.int32)
    values = nibbles(words.t())
    scales = layer.tensor("scales", (num_groups, layer.num_outputs), *_SCALE_TYPES).t()
    stored = nibbles(layer.tensor("qzeros", (num_groups, layer.num_outputs // _IN_WORD), torch.int32)).t()
    if scheme.dialect is Dialect.GPTQ:
        # Less one of zero does not fit, and took a bit of its neighbours with it: writers and readers disagree.
        if bool((stored == 15).any()):
            raise CheckpointMismatch(
                f"{layer.name}.qzeros has zero points that format v1 of GPTQ can't tell from others (stored as 15); "
                "serve a checkpoint with sym: true, or of checkpoint_format: gptq_v2"
            )
        stored = stored + 1
    if scheme.is_symmetric and bool((stored != 8).any()):
        raise CheckpointMismatch(f"{layer.name}.qzeros has zero points, but quantization_config says sym: true")
    if scheme.is_ordered:
        return _packed(values, scales, stored, size, _order(layer, "g_idx", size))
    if "g_idx" in layer.has:
        groups = layer.tensor("g_idx", (layer.num_inputs,), torch.int32, torch.int64)
        usual = torch.arange(layer.num_inputs, device=groups.device) // size
        if not torch.equal(groups.long(), usual):
            raise CheckpointMismatch(f"{layer.name}.g_idx has an order, but quantization_config has desc_act: false")
    return _packed(values, scales, stored, size, None)


def _of_awq(layer: StoredLayer, scheme: Scheme) -> PackedWeights:
    size, num_groups = _groups(layer, scheme)
    words = (layer.num_inputs, layer.num_outputs // _IN_WORD)
    values = _in_awq_order(layer.tensor("qweight", words, torch.int32)).t()
    scales = layer.tensor("scales", (num_groups, layer.num_outputs), *_SCALE_TYPES).t()
    zeros = _in_awq_order(layer.tensor("qzeros", (num_groups, words[1]), torch.int32)).t()
    return _packed(values, scales, zeros, size, None)


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8 C]: each word's numbers of 4 bits, from the lowest bits on."""
    parts = [((words >> shift) & 15).to(torch.uint8) for shift in range(0, 32, 4)]
    numbers: torch.Tensor = torch.stack(parts, dim=2).flatten(1)
    return numbers


def _in_awq_order(words: torch.Tensor) -> torch.Tensor:
    """As `nibbles`, each eight put where they belong."""
    eights = nibbles(words).unflatten(1, (-1, _IN_WORD))
    placed = torch.empty_like(eights)
    placed[:, :, list(_AWQ_OUTPUTS)] = eights
    return placed.flatten(1)


def _groups(layer: StoredLayer, scheme: Scheme) -> tuple[int, int]:
    """Inputs that share a scale, and how many groups of so many there are."""
    size = scheme.group_size or layer.num_inputs
    if layer.num_inputs % size:
        raise CheckpointMismatch(f"{layer.name} has {layer.num_inputs} inputs: no multiple of groups of {size}")
    return size, layer.num_inputs // size


def _order(layer: StoredLayer, name: str, size: int) -> torch.Tensor | None:
    """The inputs, those of one group behind each other; None where they are so already."""
    groups = layer.tensor(name, (layer.num_inputs,), torch.int32, torch.int64).long()
    order = torch.argsort(groups, stable=True)
    usual = torch.arange(layer.num_inputs, device=groups.device)
    if not torch.equal(groups[order], usual // size):
        raise CheckpointMismatch(f"{layer.name}.{name} has groups of other sizes than {size}")
    return None if torch.equal(order, usual) else order


def _packed(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int, order: torch.Tensor | None
) -> PackedWeights:
    """values [N, K] of 0 to 15, in the file's order of inputs."""
    ordered = values if order is None else values[:, order]
    return PackedWeights(pack_int4(ordered.contiguous()), scales.contiguous(), size, zeros.contiguous(), order)
