"""Decode and prefill kernels against attention by definition: head sizes, types, groups, and lengths that hurt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.paged_case import BLOCK_SIZE, TOLERANCE, attention, paged_case, relative_error

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.kv_write import write_kv
from replicas.kernels.paged_decode import paged_decode
from replicas.kernels.paged_prefill import paged_prefill
from replicas.kernels.work_sharing import WorkSharing

pytestmark = pytest.mark.interpreted

# The interpreter multiplies bfloat16 as the integers it keeps them in.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
HEADS = [(1, 1), (9, 3), (32, 8), (24, 1)]
# Around a block, around a tile, several of them; one of a single token; one padding row.
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 0, 127, 129, 300]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("num_resident", [1, 5, 40])
def test_decode_equals_attention_by_definition(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_resident: int
) -> None:
    check_decode(device, dtype, head_dim, (8, 2), LENGTHS, num_resident)


@pytest.mark.parametrize("heads", HEADS)
def test_decode_with_any_grouping_of_heads(device: torch.device, heads: tuple[int, int]) -> None:
    check_decode(device, torch.float32, 64, heads, LENGTHS, 7)


@pytest.mark.parametrize("num_resident", [3, 300])
def test_decode_of_many_rows(device: torch.device, num_resident: int) -> None:
    check_decode(device, torch.float16, 64, (2, 1), [1 + 37 * row % 300 for row in range(99)], num_resident)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too long for the interpreter")
@pytest.mark.parametrize("num_resident", [1, 8, 82, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_long_contexts(device: torch.device, dtype: torch.dtype, num_resident: int) -> None:
    check_decode(device, dtype, 128, (32, 8), [32768, 5, 4097, 8191, 0, 20000], num_resident)


UNEVEN = [7, 900, 20, 0, 1700, 64] * 9


@pytest.mark.parametrize("num_resident", [1, 3, 16, 128])
@pytest.mark.parametrize("lengths", [LENGTHS, [0], [1], [640], [64] * 16, [0, 0, 5, 0, 1000, 0], UNEVEN])
def test_pieces_cover_every_context_once(device: torch.device, lengths: list[int], num_resident: int) -> None:
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    sharing = WorkSharing(1, num_resident, 64, 64, most_rows=len(lengths))
    count = sharing.most_pieces(len(lengths))
    rows, firsts, ends, before = zip(*sharing.share_out(positions)[: count + 1].tolist(), strict=True)
    pieces = [piece for piece in zip(rows, firsts, ends, strict=True) if piece[1] < piece[2]]
    assert list(zip(rows, firsts, ends, strict=True))[: len(pieces)] == pieces, "an empty one before the last"
    tiles = [(row, tile) for row, first, end in pieces for tile in range(first, end)]
    assert tiles == [(row, tile) for row, n in enumerate(lengths) for tile in range(-(-n // 64))]
    assert list(before[: len(lengths) + 1]) == [sum(p[0] < row for p in pieces) for row in range(len(lengths) + 1)]
    sizes = [end - first for _, first, end in pieces]
    is_even = max(lengths) == min(lengths)
    assert is_even or max(sizes, default=0) <= max(1, -(-sum(-(-n // 64) for n in lengths) // num_resident))


def check_decode(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    lengths: list[int],
    num_resident: int,
) -> None:
    num_heads, num_kv_heads = heads
    case = paged_case(lengths, num_kv_heads, head_dim, dtype, device, written=[max(n - 1, 0) for n in lengths])
    query = torch.randn(len(lengths), num_heads, head_dim).to(dtype)
    new_key, new_value = (
        torch.stack([t[-1] if len(t) else torch.zeros(num_kv_heads, head_dim, dtype=dtype) for t in tokens])
        for tokens in (case.keys, case.values)
    )
    out = torch.full((len(lengths), num_heads, head_dim), torch.nan, dtype=dtype, device=device)
    # Slots in an order of their own, and a padding row that names the last one.
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    before = case.kv.clone()
    scale = head_dim**-0.5
    sharing = WorkSharing.of(num_kv_heads, head_dim, dtype, 132, len(lengths))
    sharing = replace(sharing, num_resident=num_resident)
    paged_decode(
        query.to(device), new_key.to(device), new_value.to(device), case.kv, case.table, slots, positions,
        sharing.share_out(positions), sharing.most_pieces(len(lengths)), sharing.tile_len(len(lengths)), scale, out,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        if length == 0:
            assert out[row].isnan().all()
            continue
        expected = attention(query[row : row + 1], case.keys[row], case.values[row], length - 1, scale)
        assert relative_error(out[row : row + 1], expected) < TOLERANCE[dtype], length
    changed = ~torch.isclose(case.kv.float(), before.float(), rtol=0, atol=0, equal_nan=True)
    assert int(changed.any(-1).any(-1).sum()) == 2 * sum(n > 0 for n in lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_prefill_equals_attention_by_definition(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    check_prefill(device, dtype, head_dim, (6, 2), [(0, 1), (0, 33), (5, 1), (16, 70), (63, 2), (1, 130)])


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_with_any_grouping_of_heads(device: torch.device, heads: tuple[int, int]) -> None:
    check_prefill(device, torch.float32, 64, heads, [(0, 20), (37, 30)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too long for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_long_chunks(device: torch.device, dtype: torch.dtype) -> None:
    check_prefill(device, dtype, 128, (32, 8), [(0, 1500), (4095, 513), (2048, 2048), (7, 1)])


def check_prefill(
    device: torch.device, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], spans: list[tuple[int, int]]
) -> None:
    """spans: (position, length) of each chunk. Three decode tokens come before them in the step."""
    num_heads, num_kv_heads = heads
    case = paged_case(
        [start + n for start, n in spans], num_kv_heads, head_dim, dtype, device, written=[s for s, _ in spans]
    )
    num_tokens = 3 + sum(length for _, length in spans)
    query = torch.randn(num_tokens, num_heads, head_dim).to(dtype)
    first = 3
    key = torch.zeros(num_tokens, num_kv_heads, head_dim, dtype=dtype)
    value, slots = key.clone(), torch.full((num_tokens,), len(spans), dtype=torch.int32)
    positions = torch.full((num_tokens,), -1, dtype=torch.int32)
    chunks = []
    for row, (position, length) in enumerate(spans):
        span = slice(first, first + length)
        key[span], value[span] = case.keys[row][position:], case.values[row][position:]
        slots[span], positions[span] = row, torch.arange(position, position + length, dtype=torch.int32)
        chunks.append((first, length, position))
        first += length
    slots, positions = slots.to(device), positions.to(device)
    write_kv(key.to(device), value.to(device), case.kv, case.table, slots, positions)
    out = torch.full((num_tokens, num_heads, head_dim), torch.nan, dtype=dtype, device=device)
    on_device = torch.tensor(chunks, dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    longest = max(length for _, length in spans)
    paged_prefill(query.to(device), case.kv, case.table, slots, on_device, len(chunks), longest, scale, out)
    assert out[:3].isnan().all()
    for row, (start, length, position) in enumerate(chunks):
        expected = attention(query[start : start + length], case.keys[row], case.values[row], position, scale)
        assert relative_error(out[start : start + length], expected) < TOLERANCE[dtype], (position, length)


def test_written_tokens_are_where_the_table_says(device: torch.device) -> None:
    case = paged_case([40], 2, 64, torch.float32, device, written=[0])
    positions = torch.tensor([-1, 17, 39], dtype=torch.int32, device=device)
    tokens = torch.randn(3, 2, 64, device=device)
    write_kv(tokens, tokens + 1, case.kv, case.table, torch.zeros(3, dtype=torch.int32, device=device), positions)
    for index, position in ((1, 17), (2, 39)):
        block = int(case.table[0, position // BLOCK_SIZE])
        assert torch.equal(case.kv[block, 0, position % BLOCK_SIZE], tokens[index])
        assert torch.equal(case.kv[block, 1, position % BLOCK_SIZE], tokens[index] + 1)
    assert int((~case.kv.isnan()).sum()) == 2 * 2 * 2 * 64
