"""Products of many rows on a part of a card, each by the fastest way that the library has there.

cuBLAS takes a stream to have the whole card, whatever green context that belongs to. Its kernels for Hopper launch one
block for each multiprocessor, which computes its share of the tiles; on fewer, some blocks begin when the others are
through. So on 116 of an H200's 132 the products of a prompt took 1.5 times as long as on all of them, and took no
longer on 92. Told the number, its first choice is worse still: groups of eight blocks that fit into few places of a
divided card. So all that it has is timed where it will run: 1.08 times as long on 116, 1.24 on 92 (Llama-3.1-8B, 2,048
tokens). No way divides the sum of one output, so all of them give the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from replicas.cuda.cublas_lt import ALIGNMENT_BYTES, CublasLt, NoCublasLt, ProductWay

logger = logging.getLogger(__name__)

# Fewer multiprocessors than there are: tiles and groups of blocks then fit a divided card better. On parts of 68 to 116
# of 132 the fastest was one of these for every product of Llama-3.1-8B, or within 2 % of it.
_FEWER = (2, 6, 8)
_NUM_FINALISTS, _NUM_FIRST_RUNS, _NUM_LAST_RUNS = 3, 2, 6

_Key = tuple[int, int, int, torch.dtype]  # rows, outputs, inputs


class PartProducts:
    """Of one part of a card: the way of each product, found out while its graphs are captured. One thread at a time."""

    def __init__(self, num_processors: int | None, library: CublasLt | None) -> None:
        """num_processors: None: torch's own choice is as good there. library: None: there is none."""
        self._targets = () if num_processors is None else (0, *(num_processors - fewer for fewer in _FEWER))
        self._library = library
        self._ways: dict[_Key, ProductWay | None] = {}
        self._is_choosing = False

    @contextmanager
    def used(self, *, is_choosing: bool = False) -> Iterator[None]:
        """By what this thread launches or captures within it. is_choosing: ways of new products are timed, which
        blocks; else these are torch's."""
        token = _HERE.set(self if self._targets and self._library is not None else None)
        self._is_choosing = is_choosing
        try:
            yield
        finally:
            self._is_choosing = False
            _HERE.reset(token)

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """rows [M, K] times weight [N, K] transposed, [M, N]; None where torch is to do it: nothing is faster, or known
        for this shape, or the tensors lie where the library can't have them. Does not wait, but for a product that is
        new while ways are chosen."""
        rows = rows.contiguous()
        key = (rows.shape[0], weight.shape[0], weight.shape[1], rows.dtype)
        if key not in self._ways:
            if not self._is_choosing or torch.cuda.is_current_stream_capturing():
                return None
            self._ways[key] = self._chosen(rows, weight)
        way = self._ways[key]
        if way is None or not _are_aligned(rows, weight):
            return None
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        if way.run(rows, weight, out):
            return out
        self._ways[key] = None
        extra = {"event": "product_way_failed", "product": list(key[:3])}
        logger.warning("a product's fastest way can't be launched any more: it is torch's from now on", extra=extra)
        return None

    def _chosen(self, rows: torch.Tensor, weight: torch.Tensor) -> ProductWay | None:
        """None where torch's own is the fastest."""
        assert self._library is not None
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        if not _are_aligned(rows, weight, out):
            return None

        def by(way: ProductWay) -> Callable[[], bool]:
            return lambda: way.run(rows, weight, out)

        sizes = (rows.shape[0], weight.shape[0], weight.shape[1])
        try:
            ways = list(self._library.ways(sizes, rows.dtype, self._targets))
        except NoCublasLt as error:
            extra = {"event": "no_product_ways", "product": list(sizes), "reason": str(error)}
            logger.warning("a product on a part of the card is torch's", extra=extra)
            return None
        first = fastest(ways, lambda way: _seconds(by(way), _NUM_FIRST_RUNS))[:_NUM_FINALISTS]
        best = fastest([way for _, way in first], lambda way: _seconds(by(way), _NUM_LAST_RUNS))
        if not best:
            return None
        torchs_s = _seconds(lambda: torch.nn.functional.linear(rows, weight) is not None, _NUM_LAST_RUNS)
        assert torchs_s is not None
        return best[0][1] if best[0][0] < torchs_s else None


def part_here() -> PartProducts | None:
    """Of the part of the card on which this thread is launching; None: the whole one."""
    return _HERE.get()


def fastest(
    ways: Iterable[ProductWay], seconds: Callable[[ProductWay], float | None]
) -> list[tuple[float, ProductWay]]:
    """Those that could be run, the fastest first."""
    timed = [(taken_s, index, way) for index, way in enumerate(ways) if (taken_s := seconds(way)) is not None]
    return [(taken_s, way) for taken_s, _, way in sorted(timed, key=lambda entry: entry[:2])]


def _are_aligned(*tensors: torch.Tensor) -> bool:
    return not any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in tensors)


def _seconds(run: Callable[[], bool], count: int) -> float | None:
    """Of one run on the current stream, after one more; None if it can't be launched. Blocks."""
    if not run():
        return None
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / count


# As torch keeps its current stream: what a thread's launches are for, down to an operator that a compiler has called.
# It can't be an argument of that: operators take tensors and numbers, and one twin of the modules serves all parts.
_HERE: ContextVar[PartProducts | None] = ContextVar("part_of_the_card", default=None)
