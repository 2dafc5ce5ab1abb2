"""The kernels alone: bandwidth of decode attention, rate of prefill attention, cost of drawing tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.step_times import device_ms
from replicas.kernels.gemv import gemv
from replicas.kernels.paged_decode import paged_decode
from replicas.kernels.paged_prefill import paged_prefill
from replicas.kernels.slot_columns import BLOCK_TABLE, sampling_columns
from replicas.kernels.token_draw import draw_tokens
from replicas.kernels.work_sharing import WorkSharing
from scheduler.sampling_params import SamplingParams

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def graph_ms(action: Any, num_repeats: int = 50) -> float:
    """Device time of an action within a graph: no launch cost."""
    for _ in range(2):
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            action()
    return device_ms(graph.replay, num_repeats // 10) / 10


def decode_attention(
    contexts: Sequence[int],
    heads: int = HEADS,
    num_resident: int | None = None,
    tile: tuple[int, int, int] | None = None,
    stored: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """GB/s of one layer's decode attention over more layers than the L2 cache holds. contexts: one for each row. tile:
    keys, warps, stages. stored: the pool's type."""
    batch = len(contexts)
    num_blocks = [-(-context // BLOCK) for context in contexts]
    layers = max(1, min(8, int(4e9 / (sum(num_blocks) * BLOCK * KV_HEADS * DIM * 4))))
    pool = torch.randn(sum(num_blocks), layers, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).to(stored)
    order = torch.randperm(sum(num_blocks), device="cuda")
    block_table = torch.nn.utils.rnn.pad_sequence(order.split(num_blocks), batch_first=True)
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    positions = torch.tensor([context - 1 for context in contexts], dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).to(stored)
    out = torch.empty_like(q)
    sharing = WorkSharing.of(KV_HEADS, DIM, torch.bfloat16, 132, batch)
    sharing = replace(sharing, num_resident=num_resident or sharing.num_resident)
    if tile:
        sharing = replace(sharing, short_tile=tile[0], long_tile=tile[0])
    num_warps, num_stages = tile[1:] if tile else (4, None)
    shares, num_pieces, tile_len = sharing.share_out(positions), sharing.most_pieces(batch), sharing.tile_len(batch)
    layer = iter(range(10**9))

    def once() -> None:
        view = pool[:, next(layer) % layers]
        paged_decode(
            q, k, k, view, block_table, slots, positions, shares, num_pieces, tile_len, DIM**-0.5, out,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    ms = graph_ms(once)
    gigabytes = sum(contexts) * KV_HEADS * DIM * 2 * pool.element_size() / 1e9
    return {
        "batch": batch, "longest": max(contexts), "heads": heads, "resident": sharing.num_resident,
        "tile": str(tile or "default"), "ms": ms, "GB/s": 1000 * gigabytes / ms,
    }  # fmt: skip


def single_row_products() -> list[dict[str, Any]]:
    """GB/s of the kernel and of the library for every linear layer of both shapes, over more than the L2 holds."""
    rows = []
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
              (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024))  # fmt: skip
    for num_out, num_in in shapes:
        copies = max(1, min(40, int(6e8 / (num_out * num_in * 2))))
        weights = torch.randn(copies, num_out, num_in, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(1, num_in, device="cuda", dtype=torch.bfloat16)
        number = iter(range(10**9))
        gigabytes = num_out * num_in * 2 / 1e9

        def rate(action: Any, gigabytes: float = gigabytes) -> float:
            return 1000 * gigabytes / graph_ms(action, 40)

        def weight(weights: torch.Tensor = weights, number: Any = number, copies: int = copies) -> torch.Tensor:
            return weights[next(number) % copies]

        row: dict[str, Any] = {"shape": f"{num_out}x{num_in}", "library": rate(lambda x=x, w=weight: x @ w().T)}
        for tile in ((1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 8), (8, 512, 4), (4, 512, 2), (16, 512, 8)):
            row[str(tile)] = rate(lambda x=x, w=weight, t=tile: gemv(x, w(), None, t))
        rows.append(row)
    return rows


def prefill_attention(length: int) -> dict[str, Any]:
    """TFLOP/s of causal attention of one prompt: over the pool, and by torch's kernels."""
    num_blocks = -(-length // BLOCK)
    pool = torch.randn(num_blocks, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    block_table = torch.arange(num_blocks, device="cuda")[None].contiguous()
    q = torch.randn(length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    slots = torch.zeros(length, dtype=torch.int32, device="cuda")
    chunks = torch.tensor([[0, length, 0], [0, 0, 0]], dtype=torch.int32, device="cuda")
    ours = graph_ms(lambda: paged_prefill(q, pool, block_table, slots, chunks, 1, length, DIM**-0.5, out), 20)
    flop = 2 * 2 * HEADS * DIM * length * length / 2
    row: dict[str, Any] = {"length": length, "paged TF/s": flop / ours / 1e9}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q4 = q[None].transpose(1, 2)
    k4 = torch.randn(1, length, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel([backend]):
            ms = graph_ms(lambda: F.scaled_dot_product_attention(q4, k4, k4, is_causal=True, enable_gqa=True), 20)
        row[f"{name} TF/s"] = flop / ms / 1e9
    return row


def token_draws(batch: int, vocab_size: int) -> dict[str, Any]:
    """Milliseconds of drawing a token for each row: greedy, sampled, with top-k and top-p."""
    logits = torch.randn(batch, vocab_size, device="cuda").bfloat16()
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    positions = torch.full((batch,), 100, dtype=torch.int32, device="cuda")
    row: dict[str, Any] = {"batch": batch, "vocab": vocab_size}
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "sampled": SamplingParams(temperature=0.8, seed=1),
        "top-k": SamplingParams(temperature=0.8, top_k=50, seed=1),
        "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
        "top-k and -p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    }
    for name, params in kinds.items():
        state = torch.zeros(batch + 1, BLOCK_TABLE + 8, dtype=torch.int64)
        for column, value in sampling_columns(params).items():
            state[:, column] = value
        on_device = state.cuda()
        flags = {
            "has_sampled": name != "greedy",
            "has_filtered": name.startswith("top"),
            "most_kept": max(0, params.top_k),
        }

        def draw(state: torch.Tensor = on_device, flags: dict[str, Any] = flags) -> torch.Tensor:
            return draw_tokens(logits, state, slots, positions, slots, **flags)

        row[f"{name} ms"] = graph_ms(draw, 20)
    return row
