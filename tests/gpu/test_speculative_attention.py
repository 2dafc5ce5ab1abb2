"""Decode attention of several queries a row: against the definition, and to the bit against one query alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replicas.stored_numbers import FP8
from tests.gpu.paged_case import BLOCK_SIZE, TOLERANCE, attention, paged_case, relative_error

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.paged_decode import RowQueries, paged_decode, query_sizes
from replicas.kernels.work_sharing import WorkSharing

pytestmark = pytest.mark.interpreted

# The interpreter multiplies bfloat16 as the integers it keeps them in.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Positions of the rows' first queries: new tokens at a block's edge, at a tile's, at a piece's; -1: a padding row.
FIRSTS = [0, 1, 14, 15, 16, 61, 62, 63, -1, 125, 127, 300]


class SeveralQueries:
    """Rows of some queries each, as far as they are real; their keys and values, and what stands in the pool."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], firsts: list[int],
        counts: list[int], num_queries: int, num_resident: int = 5,
    ) -> None:  # fmt: skip
        """counts: real queries of each row; what is behind them is padding."""
        self.device, self.dtype, self.num_queries = device, dtype, num_queries
        self.firsts, self.counts = firsts, [n if first >= 0 else 0 for n, first in zip(counts, firsts, strict=True)]
        self.num_heads, self.num_kv_heads = heads
        lengths = [first + n for first, n in zip(firsts, self.counts, strict=True)]
        lengths = [max(0, length) for length in lengths]
        self.case = paged_case(
            lengths, self.num_kv_heads, head_dim, dtype, device, written=[max(0, first) for first in firsts]
        )
        generator = torch.Generator().manual_seed(3)
        self.query = torch.randn(len(firsts), num_queries, self.num_heads, head_dim, generator=generator).to(dtype)
        self.key, self.value = (
            torch.full((len(firsts), num_queries, self.num_kv_heads, head_dim), torch.nan, dtype=dtype) for _ in "kv"
        )
        for row, (first, count) in enumerate(zip(firsts, self.counts, strict=True)):
            if count:
                self.key[row, :count] = self.case.keys[row][first:]
                self.value[row, :count] = self.case.values[row][first:]
        self.scale = head_dim**-0.5
        sharing = WorkSharing.of(self.num_kv_heads, head_dim, dtype, 132, len(firsts))
        self.sharing = replace(sharing, num_resident=num_resident)

    def attended(self, kv: torch.Tensor | None = None) -> torch.Tensor:
        """[R, Q, heads, head_dim], NaN where nothing was written. Mutates the pool."""
        num_rows, most = len(self.firsts), self.num_queries
        firsts = torch.tensor(self.firsts, dtype=torch.int32, device=self.device)
        if most == 1:
            return self.attended_alone(firsts)
        query, key, value = (self.real(t).to(self.device) for t in (self.query, self.key, self.value))
        places = [sum(self.counts[:row]) for row in range(num_rows)]
        rows = torch.tensor([*zip(range(num_rows), places, self.counts, self.firsts, strict=True)], dtype=torch.int32)
        shares = self.sharing.share_out(firsts)
        out = torch.full(query.shape, torch.nan, dtype=self.dtype, device=self.device)
        nothing = torch.full((2,), 10**6, dtype=torch.int32, device=self.device)
        paged_decode(
            query, key, value, self.case.kv if kv is None else kv, self.case.table, nothing, nothing,
            torch.cat([shares, rows.to(self.device)]), self.sharing.most_pieces(num_rows),
            self.sharing.tile_len(num_rows), self.scale, out, rows=RowQueries(most, num_rows, len(shares)),
        )  # fmt: skip
        padded = torch.full(self.query.shape, torch.nan, dtype=self.dtype, device=self.device)
        for row, (place, count) in enumerate(zip(places, self.counts, strict=True)):
            padded[row, :count] = out[place : place + count]
        return padded

    def attended_alone(self, positions: torch.Tensor) -> torch.Tensor:
        """As a plain step does it."""
        num_rows = len(positions)
        query, key, value = (t[:, 0].to(self.device) for t in (self.query, self.key, self.value))
        out = torch.full(query.shape, torch.nan, dtype=self.dtype, device=self.device)
        slots = torch.arange(num_rows, dtype=torch.int32, device=self.device)
        paged_decode(
            query, key, value, self.case.kv, self.case.table, slots, positions, self.sharing.share_out(positions),
            self.sharing.most_pieces(num_rows), self.sharing.tile_len(num_rows), self.scale, out,
        )  # fmt: skip
        return out[:, None]

    def real(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of [R, Q, ...] those that are no padding, one behind the other."""
        return torch.cat([tokens[row, :count] for row, count in enumerate(self.counts)])

    def check(self) -> None:
        before = self.case.kv.clone()
        out = self.attended()
        for row, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            if first < 0:
                assert out[row].isnan().all()
                continue
            keys, values = self.case.keys[row], self.case.values[row]
            expected = attention(self.query[row, :count], keys, values, first, self.scale)
            assert relative_error(out[row, :count], expected) < TOLERANCE[self.dtype], (row, first)
            assert out[row, count:].isnan().all()
            for position in range(first, first + count):
                block = int(self.case.table[row, position // BLOCK_SIZE])
                assert torch.equal(self.case.kv[block, 0, position % BLOCK_SIZE].cpu(), keys[position])
                assert torch.equal(self.case.kv[block, 1, position % BLOCK_SIZE].cpu(), values[position])
        changed = ~torch.isclose(self.case.kv.float(), before.float(), rtol=0, atol=0, equal_nan=True)
        assert int(changed.any(-1).any(-1).sum()) == 2 * sum(self.counts), "only real tokens are written"


def counts_of(num_queries: int) -> list[int]:
    """Of FIRSTS: all of them real, some, or one."""
    return [1 + (num_queries - 1 - row) % num_queries for row in range(len(FIRSTS))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "num_queries"), [(64, 5), (96, 3), (128, 8), (256, 5)])
def test_several_queries_equal_attention_by_definition(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_queries: int
) -> None:
    SeveralQueries(device, dtype, head_dim, (8, 2), FIRSTS, counts_of(num_queries), num_queries).check()


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (16, 2), (40, 1)])
@pytest.mark.parametrize("num_resident", [1, 40])
def test_several_queries_with_any_grouping_of_heads(
    device: torch.device, heads: tuple[int, int], num_resident: int
) -> None:
    """With many heads a KV head the queries are divided among programs."""
    SeveralQueries(device, torch.float32, 64, heads, FIRSTS, counts_of(5), 5, num_resident).check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too long for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [3, 5, 8])
def test_several_queries_of_long_contexts(device: torch.device, dtype: torch.dtype, num_queries: int) -> None:
    firsts = [32767, 5, 4096, 8191, -1, 20000]
    SeveralQueries(device, dtype, 128, (32, 8), firsts, [num_queries] * 6, num_queries, 82).check()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 24, 40])
@pytest.mark.parametrize("num_queries", [1, 2, 3, 5, 8])
def test_no_product_has_more_rows_than_one_querys_heads_or_32(group: int, num_queries: int) -> None:
    sizes = query_sizes(group, num_queries)
    assert sizes["MEMBERS_PADDED"] >= group * sizes["QUERIES_AT_ONCE"]
    alone = query_sizes(group, 1)["MEMBERS_PADDED"]
    assert sizes["MEMBERS_PADDED"] <= max(32, alone)
    assert -(-num_queries // sizes["QUERIES_AT_ONCE"]) * sizes["QUERIES_AT_ONCE"] < num_queries + max(1, 32 // group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "num_queries"), [((8, 2), 3), ((8, 2), 5), ((16, 2), 8), ((9, 3), 5)])
def test_the_first_query_has_the_bits_that_it_has_alone(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], num_queries: int
) -> None:
    """The same pieces, the same order of sums. So have all others, where the one alone has the first one's pieces."""
    several = SeveralQueries(device, dtype, 64, heads, FIRSTS, [num_queries] * len(FIRSTS), num_queries)
    out = several.attended(several.case.kv.clone())
    alone = SeveralQueries(device, dtype, 64, heads, FIRSTS, [1] * len(FIRSTS), 1)
    alone.case, alone.query = several.case, several.query[:, :1]
    alone.key, alone.value = several.key[:, :1], several.value[:, :1]
    assert_same_bits(alone.attended()[:, 0].nan_to_num(), out[:, 0].nan_to_num())
    # Then the second one, once the first is in the pool, in rows whose tiles are as many.
    same = [row for row, first in enumerate(FIRSTS) if first >= 0 and first // 64 == (first + 1) // 64]
    assert len(same) > 4
    alone.firsts = [first + (row in same) for row, first in enumerate(FIRSTS)]
    alone.query, alone.key, alone.value = (t[:, 1:2] for t in (several.query, several.key, several.value))
    second = alone.attended()
    for row in same:
        assert_same_bits(second[row, 0], out[row, 1])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """On a card. The interpreter's products are NumPy's, whose sums are others for other numbers of rows."""
    if torch.cuda.is_available():
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, atol=2e-6 if got.dtype is torch.float32 else 1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_does_not_depend_on_those_beside_it(device: torch.device, dtype: torch.dtype) -> None:
    """Another draft, of any numbers, or none: what stands in front of it keeps its bits; and so do other rows."""
    case = SeveralQueries(device, dtype, 64, (8, 2), FIRSTS, [5] * len(FIRSTS), 5)
    before = case.case.kv.clone()
    expected = case.attended(before.clone())
    case.query[:, 2:] *= 1000
    case.key[:, 2:] = case.key[:, 2:].flip(0) * 30
    case.value[:, 2:] = 6e4
    assert_same_bits(case.attended(before.clone())[:, :2].nan_to_num(), expected[:, :2].nan_to_num())
    case.counts = [2 if first >= 0 else 0 for first in FIRSTS]
    assert_same_bits(case.attended(before.clone())[:, :2].nan_to_num(), expected[:, :2].nan_to_num())
    case.counts = [5 if row == 3 else n for row, n in enumerate(case.counts)]
    assert_same_bits(case.attended(before.clone())[:, :2].nan_to_num(), expected[:, :2].nan_to_num())


@pytest.mark.parametrize("num_queries", [5, 8])
def test_several_queries_over_a_pool_of_fp8(device: torch.device, num_queries: int) -> None:
    """As over a pool of the model's type that holds the same numbers."""
    case = SeveralQueries(device, torch.float16, 64, (8, 2), FIRSTS, counts_of(num_queries), num_queries)
    stored = case.case.kv.to(FP8)
    case.key, case.value = (t.to(FP8).to(torch.float16) for t in (case.key, case.value))
    expected = case.attended(stored.to(torch.float16))
    torch.testing.assert_close(case.attended(stored), expected, atol=1e-3, rtol=1e-3, equal_nan=True)
