"""What pieces of rows' contexts have given, weighed: beside the same in torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")

from replicas.kernels import paged_decode as paged_decode_module
from replicas.kernels.paged_decode import paged_decode
from replicas.kernels.piece_weighing import weigh_pieces
from replicas.kernels.work_sharing import WorkSharing
from tests.gpu.paged_case import paged_case

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(("num_rows", "num_pieces"), [(1, 2), (5, 2), (2, 23)])
def test_pieces_of_queries_are_weighed_by_their_log_sum_exp(
    num_rows: int, num_pieces: int, device: torch.device
) -> None:
    torch.manual_seed(3)
    num_heads, dim, most = 4, 64, 3
    partial = torch.randn(num_pieces * num_rows * most, num_heads, dim).to(device)
    lse = torch.randn(num_pieces * num_rows * most, num_heads).to(device)
    shares = torch.zeros(num_pieces * num_rows + 2 + num_rows, 4, dtype=torch.int32)
    shares[: num_rows + 1, 3] = num_pieces * torch.arange(num_rows + 1)
    rows_at = len(shares) - num_rows
    counts = [1 + row % most for row in range(num_rows)]  # queries of each row
    for row, count in enumerate(counts):
        shares[rows_at + row] = torch.tensor([row, sum(counts[:row]), count, 0])
    constants = {"HEAD_DIM": dim, "DIM_PADDED": dim, "ROWS_AT": rows_at, "IS_EARLY": False}
    out = torch.zeros(sum(counts), num_heads, dim, device=device)
    weigh_pieces(out, partial, lse, shares.to(device), num_rows, most, constants)
    weights = torch.softmax(lse.view(num_rows, num_pieces, most, num_heads) * math.log(2.0), 1)[..., None]
    whole = (weights * partial.view(num_rows, num_pieces, most, num_heads, dim)).sum(1)
    wanted = torch.cat([whole[row, :count] for row, count in enumerate(counts)])
    assert torch.allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_layers_of_a_step_count_in_the_same_place(heads: tuple[int, int], device: torch.device) -> None:
    """Whatever lay there before: one layer after the other, rows of one piece and of many, and a padding row."""
    num_heads, num_kv_heads = heads
    lengths, dim = [700, 64, 0, 1500, 65], 32
    case = paged_case(lengths, num_kv_heads, dim, torch.float32, device, written=[max(n - 1, 0) for n in lengths])
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    sharing = replace(WorkSharing.of(num_kv_heads, dim, torch.float32, 132, len(lengths)), num_resident=60)
    shares = sharing.share_out(positions, sharing.empty_shares(device).fill_(7))
    counts = shares.view(-1)[-len(lengths) * num_kv_heads :]
    assert not counts.any()
    before = shares[: sharing.most_pieces(len(lengths)), 3].clone()
    assert int((before[1 : len(lengths)] - before[: len(lengths) - 1] > 10).sum()) >= 2, "no row of many pieces"
    torch.manual_seed(3)
    query = torch.randn(len(lengths), num_heads, dim, device=device)
    new = [torch.randn(len(lengths), num_kv_heads, dim, device=device) for _ in "kv"]
    outs = []
    for _ in range(3):
        out = torch.full_like(query, torch.nan)
        paged_decode(
            query, *new, case.kv, case.table, slots, positions, shares, sharing.most_pieces(len(lengths)),
            sharing.tile_len(len(lengths)), dim**-0.5, out,
        )  # fmt: skip
        outs.append(out)
        assert not counts.any()
    assert [bool(row.isnan().any()) for row in outs[0]] == [n == 0 for n in lengths]
    assert all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs[1:])


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_counting_leaves_alone_what_else_stands_in_shares(num_kv_heads: int, device: torch.device) -> None:
    """Pieces, and what rows with drafts are, of an earlier step: with as many rows as there may be, all in pieces."""
    lengths, dim = [300, 200, 260], 32
    case = paged_case(lengths, num_kv_heads, dim, torch.float32, device, written=[n - 1 for n in lengths])
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    sharing = replace(WorkSharing.of(num_kv_heads, dim, torch.float32, 132, len(lengths), 2), num_resident=12)
    shares = sharing.share_out(positions, sharing.empty_shares(device).fill_(7))
    drafting, counts = shares[sharing.rows_at :][:2], shares.view(-1)[-len(lengths) * num_kv_heads :]
    assert counts.data_ptr() >= drafting[-1].data_ptr() + drafting[-1].nbytes
    assert (drafting == 7).all()
    assert not counts.any()
    assert (shares[1 : len(lengths) + 1, 3] - shares[: len(lengths), 3] > 1).all(), "a row of one piece"
    before, query = shares.clone(), torch.randn(len(lengths), num_kv_heads, dim, device=device)
    out = torch.full_like(query, torch.nan)
    paged_decode(
        query, query, query, case.kv, case.table, slots, positions, shares, sharing.most_pieces(len(lengths)),
        sharing.tile_len(len(lengths)), dim**-0.5, out,
    )  # fmt: skip
    assert not out.isnan().any()
    assert torch.equal(shares, before)


def test_a_row_has_the_same_bits_whoever_weighs_its_pieces_and_beside_however_many(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last of them, and by a kernel behind them; beside 63 others and beside 299."""
    lengths, dim = [200] + [1] * 299, 32
    case = paged_case(lengths, 1, dim, torch.float32, device, written=[n - 1 for n in lengths])
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    sharing = replace(WorkSharing.of(1, dim, torch.float32, 132, len(lengths)), num_resident=400)
    torch.manual_seed(3)
    query = torch.randn(len(lengths), 2, dim, device=device)
    new = [torch.randn(len(lengths), 1, dim, device=device) for _ in "kv"]
    outs, behind = [], []
    weigh = paged_decode_module.weigh_pieces
    monkeypatch.setattr(paged_decode_module, "weigh_pieces", lambda *given: (behind.append(len(outs)), weigh(*given)))
    for by_last in (True, False):
        if not by_last:
            monkeypatch.setattr(paged_decode_module, "stands_alone", lambda *of_model: False)
        for count in (64, len(lengths)):
            shares = sharing.share_out(positions[:count])
            assert int(shares[1, 3]) == 7, "the first row's pieces"
            out = torch.full_like(query[:count], torch.nan)
            paged_decode_module.paged_decode(
                query[:count], new[0][:count], new[1][:count], case.kv, case.table, slots[:count], positions[:count],
                shares, sharing.most_pieces(count), sharing.tile_len(count), dim**-0.5, out,
            )  # fmt: skip
            assert not out.isnan().any()
            outs.append(out)
    assert behind == [2, 3]
    assert all(torch.equal(out[:64], outs[0]) for out in outs[1:])
    assert torch.equal(outs[1], outs[3])
