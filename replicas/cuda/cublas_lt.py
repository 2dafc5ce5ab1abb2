"""cuBLASLt by its own calls: all ways that it offers to compute one product, each to be timed and run.

torch asks for the first one only, and for the whole card. Interface: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _PROCESSORS = 3, 15  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET
_MOST_WAYS = 8  # for one number of multiprocessors: it knows no more for products of a language model
ALIGNMENT_BYTES = 256  # of all tensors: what it takes for granted


class NoCublasLt(Exception):
    """The library can't be used; says why."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class ProductWay:
    """One algorithm for x [M, K] times weight [N, K] transposed. Needs no scratch memory."""

    library: Any
    handle: ctypes.c_void_p
    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]  # of the weight, x and the result
    heuristic: _Heuristic

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
        """On the current stream, without waiting; whether it could be launched. Tensors as it was asked for, contiguous
        and aligned."""
        one, zero, none = ctypes.c_float(1.0), ctypes.c_float(0.0), ctypes.c_void_p()
        of_weight, of_x, of_out = self.layouts
        result = ctypes.c_void_p(out.data_ptr())
        code: int = self.library.cublasLtMatmul(
            self.handle, self.description,
            ctypes.byref(one), ctypes.c_void_p(weight.data_ptr()), of_weight, ctypes.c_void_p(x.data_ptr()), of_x,
            ctypes.byref(zero), result, of_out, result, of_out,
            ctypes.byref(self.heuristic, _Heuristic.algorithm.offset), none, ctypes.c_size_t(0),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return not code


class CublasLt:
    """One handle. What it makes lives as long as the process: a few hundred bytes for each product."""

    def __init__(self, library: Any = None) -> None:
        """library: cuBLASLt, as ctypes has it; None: the one that torch has loaded. Raises NoCublasLt."""
        name = f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}"
        try:
            self._library = library or ctypes.CDLL(name)
            self._handle = self._made("cublasLtCreate")
            self._preference = self._made("cublasLtMatmulPreferenceCreate")  # no scratch memory, by default
        except (OSError, AttributeError) as error:
            raise NoCublasLt(f"{name}: {error}") from error

    def ways(self, sizes: tuple[int, int, int], dtype: torch.dtype, targets: Sequence[int]) -> Iterator[ProductWay]:
        """Of a product [M, K] times [N, K] transposed, sizes M, N, K; none of another type than 16 bits. targets:
        numbers of multiprocessors to choose for; 0: all. Raises NoCublasLt."""
        if dtype not in _TYPES:
            return
        num_rows, num_out, num_in = sizes
        # Its matrices lie in columns: ours are its transposed ones, and the result is weight times x.
        shapes = ((num_in, num_out), (num_in, num_rows), (num_out, num_rows))
        of_weight, of_x, of_out = [self._layout(dtype, *shape) for shape in shapes]
        seen: set[tuple[int, bytes]] = set()
        for target in targets:
            description = self._description(target)
            found, count = (_Heuristic * _MOST_WAYS)(), ctypes.c_int()
            code = self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, description, of_weight, of_x, of_out, of_out, self._preference,
                ctypes.c_int(_MOST_WAYS), found, ctypes.byref(count),
            )  # fmt: skip
            for heuristic in found[: count.value] if not code else ():
                key = (target, bytes(heuristic.algorithm))
                if heuristic.state == 0 and heuristic.workspace_bytes == 0 and key not in seen:
                    seen.add(key)
                    yield ProductWay(self._library, self._handle, description, (of_weight, of_x, of_out), heuristic)

    def _description(self, target: int) -> ctypes.c_void_p:
        description = self._made("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_FLOAT32), ctypes.c_int(_FLOAT32))
        for attribute, value in ((_TRANSPOSE_A, 1), (_PROCESSORS, target)):
            number = ctypes.c_int32(value)
            self._call(
                "cublasLtMatmulDescSetAttribute", description, ctypes.c_int(attribute), ctypes.byref(number),
                ctypes.c_size_t(4),
            )  # fmt: skip
        return description

    def _layout(self, dtype: torch.dtype, num_rows: int, num_columns: int) -> ctypes.c_void_p:
        sizes = (ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(num_rows))
        return self._made("cublasLtMatrixLayoutCreate", ctypes.c_int(_TYPES[dtype]), *sizes)

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise NoCublasLt(f"{name}: status {code}")
