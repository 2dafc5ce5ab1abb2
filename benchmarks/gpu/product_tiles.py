"""The products of a quantised layer alone, at Llama-3.1-8B's four sizes: which tile is the fastest for how many rows.

Beside the roofline's bytes, the library's products of 8 bits and of bfloat16, and what rounding the rows costs. Weights
lie over more memory than the L2 cache holds, and are read in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.step_times import device_ms

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
FEW, MANY = (1, 16, 64), (256, 2048)
_READ_BYTES = 3e8
_CARD_BYTES_PER_S = 4.8e12
_GROUP = 128
# Outputs, inputs, warps, stages; then numbers of parts.
_SCALED = ((64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (64, 512, 4, 3), (128, 128, 8, 4), (128, 256, 8, 3))
_INT4 = ((128, 128, 4, 3), (128, 128, 4, 4), (64, 128, 2, 3), (64, 128, 4, 4), (128, 128, 8, 3), (256, 128, 8, 3))
_PARTS = (1, 2, 4, 8)
_FEWEST_PROGRAMS, _MOST_PROGRAMS = 64, 1400

Run = Callable[[], object]


def candidates(kind: str, num_out: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Tiles that give every multiprocessor something to do, and none too little."""
    for block_n, block_k, num_warps, num_stages in _INT4 if kind == "int4" else _SCALED:
        for num_parts in _PARTS:
            if _FEWEST_PROGRAMS <= num_out // block_n * num_parts <= _MOST_PROGRAMS:
                yield block_n, block_k, num_warps, num_stages, num_parts


def graph_ms(runs: list[Run]) -> float:
    """Device time of one of them, in a graph of all."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return device_ms(graph.replay, 3, 1) / len(runs)


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of one layer in each way, random. Numbers are not looked at."""

    fp8: list[torch.Tensor]
    int4: list[torch.Tensor]
    whole: list[torch.Tensor]
    scales: torch.Tensor
    factors: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def of(num_out: int, num_in: int) -> Weights:
        from replicas.kernels.int4_words import group_factors, words_of

        def copies(num_bytes: int) -> int:
            return max(2, min(20, round(_READ_BYTES / num_bytes)))

        def words(num_columns: int, count: int) -> list[torch.Tensor]:
            return [
                torch.randint(0, 0x70, (num_out, num_columns), dtype=torch.uint8, device="cuda") for _ in range(count)
            ]

        size, groups = num_out * num_in, num_in // _GROUP
        return Weights(
            [one.view(torch.float8_e4m3fn) for one in words(num_in, copies(size))],
            [words_of(one & 15) for one in words(num_in, copies(size // 2))],
            [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies(2 * size))],
            torch.rand(num_out, 1, device="cuda") * 1e-3,
            group_factors(
                torch.rand(num_out, groups, device="cuda") * 1e-3,
                torch.randint(0, 16, (num_out, groups), dtype=torch.uint8, device="cuda"),
            ),
            torch.zeros(num_out // 16, dtype=torch.int32, device="cuda"),
        )


class ProductTimes:
    """Of one size of layer. Blocks."""

    def __init__(self, num_out: int, num_in: int) -> None:
        self._size = num_out, num_in
        self._weights = Weights.of(num_out, num_in)

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In bfloat16; in fp8, and their scales."""
        from replicas.kernels.round_rows import round_rows

        x = torch.randn(num_rows, self._size[1], device="cuda", dtype=torch.bfloat16)
        return x, *round_rows(x, torch.float8_e4m3fn, self._size[1])

    def few(self, kind: str, num_rows: int, has_time: Callable[[], bool]) -> dict[str, Any]:
        """us and GB/s of what is shipped, and of the fastest tiles; how many were tried."""
        told = {"shipped": self._told(kind, graph_ms(self._shipped(kind, num_rows)))}
        found: dict[tuple[int, ...], float] = {}
        for tile in candidates(kind, self._size[0]):
            if has_time():
                try:
                    found[tile] = graph_ms(self._runs(kind, num_rows, tile))
                except Exception as error:  # too much shared memory, or what the compiler refuses
                    print(f"{kind} {num_rows} {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        best = sorted(found, key=lambda tile: found[tile])[:2]
        return told | {f"best {list(tile)}": self._told(kind, found[tile]) for tile in best} | {"tried": len(found)}

    def _shipped(self, kind: str, num_rows: int) -> list[Run]:
        from replicas.cuda.int4_card_linear import product_of_int4
        from replicas.cuda.quantised_card_linear import rounded_product

        w, num_in = self._weights, self._size[1]
        x, rounded, of_rows = self.rows(num_rows)
        if kind == "int4":
            return [lambda one=one: product_of_int4(x, one, w.factors, None, w.arrived, _GROUP) for one in w.int4]
        return [
            lambda one=one: rounded_product(
                rounded, of_rows, one, w.scales, None, None, w.arrived, num_in, torch.bfloat16
            )
            for one in w.fp8
        ]

    def _runs(self, kind: str, num_rows: int, tile: tuple[int, ...]) -> list[Run]:
        from replicas.kernels.int4_product import int4_product
        from replicas.kernels.scaled_product import scaled_product
        from replicas.kernels.skinny_product import ProductTile

        w, as_tile = self._weights, ProductTile(*tile)
        x, rounded, of_rows = self.rows(num_rows)
        if kind == "int4":
            return [lambda one=one: int4_product(x, one, w.factors, _GROUP, None, as_tile, w.arrived) for one in w.int4]
        return [
            lambda one=one: scaled_product(
                rounded, of_rows, one, w.scales, self._size[1], None, as_tile, w.arrived, torch.bfloat16
            )
            for one in w.fp8
        ]

    def library(self, num_rows: int) -> Mapping[str, Any]:
        """us and TFLOP/s of torch's products, and us of rounding rows, by themselves and behind what makes them, and of
        making int4 numbers."""
        from replicas.kernels.int4_unpack import int4_unpack
        from replicas.kernels.round_gated import round_gated
        from replicas.kernels.round_normed import round_normed
        from replicas.kernels.round_rows import round_rows

        w, scales = self._weights, self._weights.scales.t().contiguous()
        x, rounded, of_rows = self.rows(num_rows)
        gate_up = torch.cat((x, x), 1)

        def scaled(one: torch.Tensor, *, is_fast: bool) -> torch.Tensor:
            return torch._scaled_mm(rounded, one.t(), of_rows, scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast)

        ways: dict[str, list[Run]] = {
            "bf16": [lambda one=one: torch.nn.functional.linear(x, one) for one in w.whole],
            "_scaled_mm": [lambda one=one: scaled(one, is_fast=False) for one in w.fp8],
            "_scaled_mm, fast sums": [lambda one=one: scaled(one, is_fast=True) for one in w.fp8],
            "rounding rows": [lambda: round_rows(x, torch.float8_e4m3fn, self._size[1])] * 10,
            "of a sum's norm": [lambda: round_normed(x, x, x[0], 1e-5, torch.float8_e4m3fn)] * 10,
            "of a gate": [lambda: round_gated(gate_up, torch.float8_e4m3fn)] * 10,
        }
        if num_rows > max(FEW):
            ways["int4 made numbers"] = [
                lambda one=one: int4_unpack(one, w.factors, _GROUP, self._size[1], torch.bfloat16) for one in w.int4
            ]
        found: dict[str, Any] = {}
        for name, runs in ways.items():
            try:
                ms = graph_ms(runs)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error)[:120]}"
                continue
            found[name] = [round(1e3 * ms, 1)]
            if name[0] in "b_":
                found[name].append(round(2 * num_rows * self._size[0] * self._size[1] / ms / 1e9, 1))
        return found

    def _told(self, kind: str, ms: float) -> list[float]:
        """us, GB/s of the weights, and these as a part of what the card's memory could."""
        size = self._size[0] * self._size[1]
        num_bytes = size // 2 + 4 * (size // _GROUP) if kind == "int4" else size
        rate = num_bytes / ms / 1e-3
        return [round(1e3 * ms, 1), round(rate / 1e9), round(rate / _CARD_BYTES_PER_S, 2)]


def copied_gb_per_s() -> float:
    """What is read and written a second by copying a gigabyte."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    return round(2 * source.numel() / device_ms(lambda: to.copy_(source), 10) / 1e6)


def product_tiles(tell: Callable[[dict[str, Any]], None], budget_s: float) -> None:
    """tell: is given figures as they come. Every place has its part of the budget for trying tiles; what is over it
    has the shipped one alone."""
    started_s = time.monotonic()
    tell({"copied_gb_per_s": copied_gb_per_s()})
    places = [(size, num_rows) for size in SHAPES for num_rows in (*FEW, *MANY)]
    of_size: dict[tuple[int, int], ProductTimes] = {}
    for number, (size, num_rows) in enumerate(places):
        if size not in of_size:
            of_size.clear()
            torch.cuda.empty_cache()
            of_size[size] = ProductTimes(*size)
        until_s = started_s + budget_s * (number + 1) / len(places)
        name = f"{size[0]}x{size[1]}, {num_rows} rows"
        if num_rows in FEW:
            for kind in ("fp8", "int4"):
                tell({f"{kind} {name}": of_size[size].few(kind, num_rows, partial(_is_before, until_s))})
        tell({f"library {name}": of_size[size].library(num_rows)})


def _is_before(end_s: float) -> bool:
    return time.monotonic() < end_s
