"""What the card itself can do: the ceilings that every other figure is a fraction of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.step_times import device_ms

_NUM_BYTES = 1 << 32  # far more than the L2 cache holds
# Llama-3.1-8B's layers for 16,384 tokens, and a square product as others quote it.
_PRODUCTS = ((8192, 8192, 8192), (16384, 6144, 4096), (16384, 4096, 4096), (16384, 28672, 4096), (16384, 4096, 14336))


def bandwidths() -> dict[str, Any]:
    """GB/s of a copy within the device's memory (bytes read and written) and of reading alone."""
    source = torch.randint(-(2**31), 2**31, (_NUM_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy_ms = device_ms(lambda: target.copy_(source), 10)
    read_ms = device_ms(lambda: source.max(), 10)
    return {"copy GB/s": 2 * _NUM_BYTES / copy_ms / 1e6, "read GB/s": _NUM_BYTES / read_ms / 1e6}


def products() -> list[dict[str, Any]]:
    """TFLOP/s of the library's bf16 products, [rows, inputs] times [outputs, inputs] transposed, on random data."""
    rows = []
    for num_rows, num_out, num_in in _PRODUCTS:
        x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
        ms = device_ms(lambda x=x, weight=weight: F.linear(x, weight), 10)
        rate = 2 * num_rows * num_out * num_in / ms / 1e9
        rows.append({"product": f"{num_rows}x{num_out}x{num_in}", "ms": ms, "TFLOP/s": rate})
    return rows
