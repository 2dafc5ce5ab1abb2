"""What the loaded weights are, by every one of their bits: names and sizes of files do not tell.

Each tensor is read as a matrix of integer words, and both its row sums and its column sums are digested: a word that
changes shows in both, rows or columns that change places show in one. Integer sums wrap and have no order, so every
device gives the same. Figures: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from replicas.model.checkpoint_mismatch import CheckpointMismatch, name_some

DIGEST_BYTES = 12

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    of: torch.Tensor
    described: str  # whatever of it the sums do not tell


def digest_weights(model: nn.Module) -> str:
    """Hexadecimal digest of all parameters and saved buffers of a freshly loaded model: names, shapes, types and bits.

    Call it before projections are joined or types changed. Blocks until the device is done. Raises CheckpointMismatch
    naming tensors that are not finite numbers, or matrices of nothing but zeros, as a file has that was not wholly
    written.
    """
    tensors = list(_tensors(model))
    _refuse_broken(tensors)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        digest.update(f"{tensor.name}:{tensor.described};".encode())
    sums = [part for tensor in tensors for part in _sums(tensor.of)]
    if sums:
        digest.update(torch.cat(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[_Tensor]:
    """Each once, by its first name; of one that has others (tied weights) the names."""
    first_names: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        key = (tensor.data_ptr(), tensor.shape)
        described = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if tensor.numel() and key in first_names:
            yield _Tensor(name, tensor.new_empty(0), f"{described} as {first_names[key]}")
            continue
        first_names[key] = name
        yield _Tensor(name, tensor, described)


def _sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """int64 row sums and column sums of its words; nothing of a tensor without elements."""
    if not tensor.numel():
        return []
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    matrix = tensor.detach().contiguous().view(rows, -1)
    row_bytes = matrix.shape[1] * matrix.element_size()
    # A view of larger words needs an address that is a multiple of their size.
    word = next(of for size, of in _WORDS if row_bytes % size == 0 and matrix.data_ptr() % size == 0)
    words = matrix.view(word) if matrix.dtype is not torch.bool else matrix.to(torch.int8)
    return [words.sum(dim=1, dtype=torch.int64), words.sum(dim=0, dtype=torch.int64)]


def _refuse_broken(tensors: list[_Tensor]) -> None:
    numbers = [tensor for tensor in tensors if tensor.of.numel() and _is_looked_at(tensor.of)]
    if not numbers:
        return
    lows_highs = torch.stack([_extremes(tensor.of.detach()) for tensor in numbers]).cpu()
    is_finite = torch.isfinite(lows_highs).all(dim=1).tolist()
    is_zero = (lows_highs == 0).all(dim=1).tolist()
    if broken := [tensor.name for tensor, finite in zip(numbers, is_finite, strict=True) if not finite]:
        raise CheckpointMismatch(f"weights that are not finite numbers: {name_some(broken)}")
    empty = [tensor.name for tensor, zero in zip(numbers, is_zero, strict=True) if zero and tensor.of.dim() > 1]
    if empty:
        raise CheckpointMismatch(
            f"weights that are nothing but zeros: {name_some(empty)}; was the file copied or downloaded whole?"
        )


def _is_looked_at(tensor: torch.Tensor) -> bool:
    """Numbers, and such as were rounded to 8 bits. Packed ones have scales that tell."""
    return tensor.is_floating_point() or tensor.dtype is torch.int8


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    """float32 [2]: smallest and largest, or of an 8-bit float 0 and the largest of all without their signs."""
    if tensor.dtype is torch.float8_e4m3fn:
        largest = (tensor.view(torch.uint8) & 0x7F).amax()  # of what is no number the bits are the largest
        return torch.stack((torch.zeros_like(largest), largest)).view(torch.float8_e4m3fn).float()
    return torch.stack(torch.aminmax(tensor)).float()
