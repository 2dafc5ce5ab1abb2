"""Rows that are rotated by the kernel that attends over their contexts: to the bit what two kernels make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import rotated_attention
from replicas.cuda.rotated_attention import attend_rotated, rotates_in_attention
from replicas.cuda.step import CudaStep, Launches
from replicas.kernels import paged_decode
from replicas.kernels.rotary_heads import HeadNorms
from replicas.kernels.work_sharing import WorkSharing
from replicas.stored_numbers import FP8, as_bits, as_stored
from tests.gpu.paged_case import BLOCK_SIZE, TOLERANCE, PagedCase, attention, paged_case, relative_error
from tests.gpu.test_rotation import EPSILON, expected

pytestmark = pytest.mark.interpreted

# The interpreter multiplies bfloat16 as the integers it keeps them in.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
LENGTHS = [1, 17, 0, 140, 64]  # 0: a padding row; 140: several pieces
REAL = torch.tensor([n > 0 for n in LENGTHS])
SCALES = (0.37, 2.5)


@dataclass
class Rows:
    """A step's projected tokens, all on the host but what the pool is, and the step over it."""

    projected: torch.Tensor
    norms: HeadNorms | None
    cos: torch.Tensor
    sin: torch.Tensor
    case: PagedCase
    step: CudaStep
    heads: tuple[int, int]
    scales: tuple[float, float]

    @property
    def scale(self) -> float:
        return self.cos.shape[1] ** -0.5

    def attended(self, kv: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim]. Mutates kv."""
        device, norms = kv.device, self.norms
        given = torch.cat([self.projected, self.projected.flip(1)], 1).to(device)[:, : self.projected.shape[1]]
        query_norm, key_norm = (norms.query.to(device), norms.key.to(device)) if norms else (None, None)
        out = attend_rotated(
            given, kv, torch.tensor(self.scales, dtype=torch.float64) if kv.dtype is FP8 else None, query_norm,
            key_norm, EPSILON, self.cos.to(device), self.sin.to(device), *self.step, self.scale,
        )  # fmt: skip
        return out.unflatten(1, (self.heads[0], -1))


def rows_of(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, has_norms: bool, is_fp8: bool,
    chunk: tuple[int, int] | None = None,
) -> Rows:  # fmt: skip
    """A row for each of LENGTHS, its last token new. chunk: first position and length of what a prompt has of the last
    slot, behind the rows."""
    num_heads, num_kv_heads = heads
    start, length = chunk or (0, 0)
    lengths = [*LENGTHS, start + length]
    case = paged_case(lengths, num_kv_heads, head_dim, dtype, device, [*(max(n - 1, 0) for n in LENGTHS), start])
    scales = SCALES if is_fp8 else (1.0, 1.0)
    if is_fp8:
        stored = torch.stack([as_bits(as_stored(case.kv[:, kind], FP8, scales[kind])) for kind in (0, 1)], 1)
        case = replace(case, kv=stored.view(FP8))
    generator = torch.Generator().manual_seed(head_dim + num_heads)
    num_rows = len(LENGTHS)
    num_tokens = num_rows + length
    projected = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator).repeat(1, 2) * 7
    weights = [(0.5 + torch.rand(head_dim, generator=generator)).to(dtype) for _ in "qk"]
    sharing = WorkSharing.of(num_kv_heads, head_dim, dtype, 132, num_rows)
    sharing = replace(sharing, num_resident=7)
    positions = torch.tensor([*(n - 1 for n in LENGTHS), *range(start, start + length)], dtype=torch.int32)
    slots = torch.tensor([*range(num_rows)] + [num_rows] * length, dtype=torch.int32)
    chunks = torch.tensor([[num_rows, length, start], [0, 0, 0]], dtype=torch.int32)
    pieces, tile_len = sharing.most_pieces(num_rows), sharing.tile_len(num_rows)
    launches = Launches(num_rows, pieces, tile_len, int(length > 0), length, ())
    step = CudaStep(
        case.table, torch.cat([slots, positions]).to(device), chunks.to(device),
        sharing.share_out(positions[:num_rows].to(device)), launches.pack(),
    )  # fmt: skip
    norms = HeadNorms(weights[0], weights[1], EPSILON) if has_norms else None
    return Rows(projected, norms, angles.cos().to(dtype), angles.sin().to(dtype), case, step, heads, scales)


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """To be called: from then on rows are rotated by a kernel in front."""
    return lambda: monkeypatch.setattr(rotated_attention, "rotates_in_attention", lambda *step: False)


@pytest.fixture
def kernels_in_front(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens were given to each call of the kernel in front."""
    calls, given = [], rotated_attention.rotate_into_pool

    def counted(projected: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(len(projected))
        return given(projected, *rest, **options)

    monkeypatch.setattr(rotated_attention, "rotate_into_pool", counted)
    return calls


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, NaN too."""
    whole = torch.int32 if a.itemsize == 4 else torch.int16 if a.itemsize == 2 else torch.uint8
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True], ids=["no norms", "norms"])
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 2), 64), ((8, 2), 128), ((4, 1), 64), ((3, 1), 80)])
def test_one_kernel_gives_what_two_give(
    device: torch.device, dtype: torch.dtype, has_norms: bool, heads: tuple[int, int], head_dim: int,
    kernels_in_front: list[int], two_kernels: Any,
) -> None:  # fmt: skip
    rows = rows_of(device, dtype, heads, head_dim, has_norms, False)
    assert int(rows.step.shares[4, 3] - rows.step.shares[3, 3]) > 1, "no row lies in several pieces"
    before, of_two = rows.case.kv.clone(), rows.case.kv.clone()
    out = rows.attended(rows.case.kv)
    assert kernels_in_front == []
    two_kernels()
    expected_out = rows.attended(of_two)
    assert kernels_in_front == [len(LENGTHS)]
    assert same(out[REAL], expected_out[REAL])
    assert same(rows.case.kv, of_two)
    changed = as_bits(rows.case.kv) != as_bits(before)
    changed &= ~(rows.case.kv.float().isnan() & before.float().isnan())
    assert int(changed.any(-1).any(-1).sum()) == 2 * int(REAL.sum()), "new keys and values of real rows, no others"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True], ids=["no norms", "norms"])
@pytest.mark.parametrize("heads", [(8, 2), (3, 1), (2, 2)])
def test_what_stands_alone_gives_what_three_kernels_give(
    device: torch.device, dtype: torch.dtype, has_norms: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated and weighed by itself, and each by a kernel of its own."""
    rows = rows_of(device, dtype, heads, 64, has_norms, False)
    weighed, weigh, of_three = [], paged_decode.weigh_pieces, rows.case.kv.clone()
    monkeypatch.setattr(paged_decode, "weigh_pieces", lambda *given: (weighed.append(len(given)), weigh(*given)))
    out = rows.attended(rows.case.kv)
    assert not weighed
    for place in (paged_decode, rotated_attention):
        monkeypatch.setattr(place, "stands_alone", lambda *of_step: False)
    expected_out = rows.attended(of_three)
    assert len(weighed) == 1
    assert same(out[REAL], expected_out[REAL])
    assert same(rows.case.kv, of_three)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["model's numbers", "fp8"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["no norms", "norms"])
def test_rows_attend_as_by_definition(
    device: torch.device, dtype: torch.dtype, is_fp8: bool, has_norms: bool, kernels_in_front: list[int]
) -> None:
    heads = 8, 2
    rows = rows_of(device, dtype, heads, 64, has_norms, is_fp8)
    new_query, new_key, new_value = expected(rows.projected, rows.norms, rows.cos, rows.sin, heads)
    kv, scales = rows.case.kv, rows.scales
    out = rows.attended(kv)
    assert kernels_in_front == [len(LENGTHS)] * is_fp8
    for row, length in enumerate(LENGTHS):
        if not length:
            continue
        places = torch.arange(length)
        blocks = rows.case.table[row].cpu()[places // BLOCK_SIZE]
        stored = kv.cpu().to(torch.float32)[blocks, :, places % BLOCK_SIZE]
        for kind, new in enumerate((new_key, new_value)):
            of_row = as_stored(new[row].to(dtype), kv.dtype, scales[kind]).float()
            assert relative_error(stored[-1, kind], of_row.double()) < TOLERANCE[dtype]
        keys, values = (stored[:, kind] * scales[kind] for kind in (0, 1))
        exact = attention(new_query[row : row + 1].to(dtype), keys, values, length - 1, rows.scale)
        assert relative_error(out[row : row + 1], exact) < TOLERANCE[dtype], length


@pytest.mark.parametrize("is_fp8", [False, True], ids=["model's numbers", "fp8"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["no norms", "norms"])
def test_beside_a_prompt_rows_are_rotated_in_front_to_the_same_bits(
    device: torch.device, is_fp8: bool, has_norms: bool, kernels_in_front: list[int]
) -> None:
    """And their keys and values, whichever step has written them."""
    dtype, heads, head_dim = torch.float16, (8, 2), 128
    mixed = rows_of(device, dtype, heads, head_dim, has_norms, is_fp8, chunk=(20, 3))
    num_rows, kv = len(LENGTHS), mixed.case.kv.clone()
    alone = replace(
        mixed,
        projected=mixed.projected[:num_rows],
        cos=mixed.cos[:num_rows],
        sin=mixed.sin[:num_rows],
        step=rows_only(mixed),
    )
    out_mixed, out = mixed.attended(mixed.case.kv), alone.attended(kv)
    assert kernels_in_front == [num_rows + 3] + [num_rows] * is_fp8
    assert same(out_mixed[:num_rows][REAL], out[REAL])
    of_rows = [
        (int(mixed.case.table[row, (n - 1) // BLOCK_SIZE]), (n - 1) % BLOCK_SIZE) for row, n in enumerate(LENGTHS) if n
    ]
    for block, place in of_rows:
        assert same(mixed.case.kv[block, :, place], kv[block, :, place])
        assert kv[block, :, place].float().isfinite().all()


def rows_only(mixed: Rows) -> CudaStep:
    """The step without its prompt."""
    num_rows, step = len(LENGTHS), mixed.step
    launches = replace(Launches.unpack(step.layout), num_chunks=0, longest_chunk=0)
    places = torch.cat([step.token_slots[:num_rows], step.positions[:num_rows]])
    return CudaStep(step.block_table, places, step.chunks, step.shares, launches.pack())


def test_which_steps_are_rotated_in_attention() -> None:
    rows, of_model = Launches(5, 12, 64, 0, 0, ()), (4, torch.bfloat16)
    assert rotates_in_attention(rows, 5, *of_model)
    assert not rotates_in_attention(replace(rows, num_chunks=1, longest_chunk=3), 8, *of_model)
    assert not rotates_in_attention(replace(rows, num_queries=5, most_queries=4, rows_at=40), 5, *of_model), "drafts"
    assert not rotates_in_attention(Launches(0, 1, 64, 0, 0, ((0, 2048, 1),)), 2048, *of_model)
    assert not rotates_in_attention(rows, 5, 8, torch.bfloat16), "heads"
    assert not rotates_in_attention(rows, 5, 4, FP8)


def test_many_heads_of_a_key_are_rotated_in_front(device: torch.device, kernels_in_front: list[int]) -> None:
    rows = rows_of(device, torch.float16, (16, 1), 64, False, False)
    new_query, _, _ = expected(rows.projected, None, rows.cos, rows.sin, rows.heads)
    out = rows.attended(rows.case.kv)
    assert kernels_in_front == [len(LENGTHS)]
    stored = rows.case.kv.cpu()[
        rows.case.table[1].cpu()[torch.arange(17) // BLOCK_SIZE], :, torch.arange(17) % BLOCK_SIZE
    ]
    exact = attention(new_query[1:2], stored[:, 0], stored[:, 1], 16, rows.scale)
    assert relative_error(out[1:2], exact) < TOLERANCE[torch.float16]


def test_positions_that_rotate_a_part_of_a_head_are_refused(device: torch.device) -> None:
    rows = rows_of(device, torch.float16, (4, 2), 64, False, False)
    with pytest.raises(ValueError, match=r"rotary positions of \(5, 32\) for 5 tokens with heads of 64"):
        replace(rows, cos=rows.cos[:, :32].contiguous(), sin=rows.sin[:, :32].contiguous()).attended(rows.case.kv)
