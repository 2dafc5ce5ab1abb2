"""The kernels alone: bandwidth of decode attention, rate of prefill attention, cost of drawing tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.step_times import device_ms
from replicas.cuda_step import split_contexts
from replicas.kernels.paged_decode import paged_decode
from replicas.kernels.paged_prefill import paged_prefill
from replicas.kernels.token_draw import draw_tokens
from replicas.slot_columns import BLOCK_TABLE, sampling_columns
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


def decode_attention(batch: int, context: int, splits: list[int | None]) -> list[dict[str, Any]]:
    """GB/s of one layer's decode attention of Llama-3.1-8B, over as many pools as do not fit into the L2 cache."""
    num_blocks = -(-context // BLOCK)
    layers = max(1, min(8, int(4e9 / (batch * num_blocks * BLOCK * KV_HEADS * DIM * 4))))
    pool = torch.randn(batch * num_blocks, layers, 2, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(batch * num_blocks, device="cuda")
    block_table = order.view(batch, num_blocks).contiguous()
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    rows = []
    for wanted in splits:
        num, fewest = split_contexts(batch, KV_HEADS, context, 132) if wanted is None else (wanted, 64)
        state = {"layer": 0}

        def once(num: int = num, fewest: int = fewest, state: dict[str, int] = state) -> None:
            layer = state["layer"] = (state["layer"] + 1) % layers
            paged_decode(q, k, k, pool[:, layer], block_table, slots, positions, DIM**-0.5, num, fewest, out)

        ms = graph_ms(once)
        gigabytes = batch * context * KV_HEADS * DIM * 4 / 1e9
        rows.append(
            {"batch": batch, "context": context, "splits": num, "auto": wanted is None, "ms": ms,
             "GB/s": 1000 * gigabytes / ms}
        )  # fmt: skip
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
    }
    for name, params in kinds.items():
        state = torch.zeros(batch + 1, BLOCK_TABLE + 8, dtype=torch.int64)
        for column, value in sampling_columns(params).items():
            state[:, column] = value
        on_device = state.cuda()
        row[f"{name} ms"] = graph_ms(lambda s=on_device: draw_tokens(logits, s, slots, positions, slots), 20)  # type: ignore[misc]
    return row
