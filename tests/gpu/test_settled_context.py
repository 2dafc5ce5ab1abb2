"""Decode attention that reads what is settled before it waits: to the bit what it is when it waits first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine.step_plans import set_up
from replicas.stored_numbers import FP8, as_stored
from scheduler.plan import StepPlan
from tests.gpu import test_cuda_runner as cuda_rig
from tests.gpu.paged_case import paged_case

pytest.importorskip("triton", reason="a CPU torch comes without triton")
import triton
import triton.language as tl

from benchmarks.gpu import context_ahead
from benchmarks.gpu.context_ahead import CapturedWays, attending
from replicas.cuda import attention
from replicas.cuda.step import CudaStep, Launches
from replicas.kernels import paged_decode as of_rows
from replicas.kernels.settled_context import fetched_blocks, share_of_blocks
from replicas.kernels.work_sharing import WorkSharing

pytestmark = pytest.mark.interpreted

card = cuda_rig.card
ON_CARD = torch.cuda.is_available()
# Positions of rows' first queries: in a first tile, at its edge, behind some; a new token alone in its tile; padding.
FIRSTS = [0, 1, 62, 63, 64, 65, -1, 128, 300]
BLOCK_N, HEAD_DIM = 64, 64


def attended(
    device: torch.device, stored: torch.dtype, num_queries: int, tiles_ahead: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the operator that layers call: what comes of a step's rows, and the bits of the pool behind it."""
    dtype = torch.float16
    counts = [0 if first < 0 else 1 + row % num_queries for row, first in enumerate(FIRSTS)]
    lengths = [max(0, first + count) for first, count in zip(FIRSTS, counts, strict=True)]
    case = paged_case(lengths, 2, HEAD_DIM, torch.float32, device, [max(0, first) for first in FIRSTS])
    kv = as_stored(case.kv, FP8) if stored is FP8 else case.kv.to(dtype)
    generator = torch.Generator().manual_seed(5)
    num_tokens = len(FIRSTS) if num_queries == 1 else sum(counts)
    query = torch.randn(num_tokens, 6, HEAD_DIM, generator=generator).to(device, dtype)
    key, value = torch.randn(2, num_tokens, 2, HEAD_DIM, generator=generator).to(device, dtype)
    sharing = WorkSharing(5, BLOCK_N, BLOCK_N, len(FIRSTS), len(FIRSTS))
    shares = sharing.share_out(torch.tensor(FIRSTS, dtype=torch.int32, device=device))
    launches = Launches(len(FIRSTS), sharing.most_pieces(len(FIRSTS)), BLOCK_N, 0, 0, ())
    places = torch.tensor([*range(len(FIRSTS)), *FIRSTS], dtype=torch.int32, device=device)
    if num_queries > 1:
        rows = [(row, sum(counts[:row]), counts[row], first) for row, first in enumerate(FIRSTS)]
        shares[sharing.rows_at :] = torch.tensor(rows, dtype=torch.int32, device=device)
        launches = replace(launches, num_queries=num_tokens, most_queries=num_queries, rows_at=sharing.rows_at)
        places = torch.full((2 * num_tokens,), 10**6, dtype=torch.int32, device=device)  # not looked at
    step = CudaStep(case.table, places, torch.zeros(2, 3, dtype=torch.int32), shares, launches.pack())
    with attending(tiles_ahead):
        out = attention.attend_written(query, key, value, kv, step, launches, HEAD_DIM**-0.5, (1.0, 1.0))
    real = [row for row, first in enumerate(FIRSTS) if first >= 0] if num_queries == 1 else slice(None)
    return out[real], kv.view(torch.uint8)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("stored", [torch.float16, FP8])
def test_what_is_read_early_changes_no_bit(device: torch.device, stored: torch.dtype, num_queries: int) -> None:
    out, pool = attended(device, stored, num_queries, None)
    assert not out.isnan().any()
    for tiles_ahead in (0, 2):
        out_early, pool_early = attended(device, stored, num_queries, tiles_ahead)
        assert torch.equal(out_early, out)
        assert torch.equal(pool_early, pool)


def test_nothing_is_read_early_unless_it_is_asked_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    constants: list[tuple[bool, bool]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Launched:
            return self

        def __call__(self, *arguments: object, IS_SETTLED: bool, NUM_FETCHED: int, **others: object) -> None:
            constants.append((IS_SETTLED, NUM_FETCHED > 0))

    monkeypatch.setattr(of_rows, "_attend_piece", Launched())
    monkeypatch.setattr(of_rows, "weigh_pieces", lambda *arguments: None)
    monkeypatch.setattr(of_rows, "launches_early", lambda device: True)
    for tiles_ahead in (None, 0, 2):
        attended(device, torch.float16, 1, tiles_ahead)
    assert constants == [(False, False), (True, False), (True, True)]


def test_the_benchmark_captures_each_way_and_all_compute_the_same(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    attend = attention.paged_decode

    def attend_so(*arguments: Any, tiles_ahead: int | None) -> None:
        seen.append(tiles_ahead)
        attend(*arguments, tiles_ahead=tiles_ahead)

    def set_up_small(rows: int, context: int, block_size: int) -> StepPlan:
        plan = set_up(rows, context, block_size)
        return replace(plan, slot_inits=tuple(replace(init, last_token=7 + init.slot) for init in plan.slot_inits))

    monkeypatch.setattr(context_ahead, "set_up", set_up_small)  # its vocabulary is small
    monkeypatch.setattr(context_ahead, "_STEPS", ((2, 70),))
    monkeypatch.setattr(context_ahead, "_MOST_ROWS", 2)
    monkeypatch.setattr(context_ahead, "_LONGEST", 128)
    loaded = cuda_rig.load(tmp_path, device, "LlamaForCausalLM")
    engine: Any = SimpleNamespace(runner=cuda_rig.runner_of(loaded, device), model=loaded.model)
    engine.runner.pool.tensor.normal_()
    with monkeypatch.context() as patched:
        patched.setattr(attention, "paged_decode", attend_so)
        ways = CapturedWays(engine, torch.float16)
    assert list(dict.fromkeys(seen)) == [None, 0, 1, 2, 4]
    if not ON_CARD:
        monkeypatch.setattr(context_ahead, "device_ms", lambda action, num_repeats: len([action()]))
    times_ms, differing = ways.measured(2, 70)
    assert times_ms.keys() == differing.keys()
    assert all(number > 0 for number in times_ms.values())
    assert set(differing.values()) == {0}


@triton.jit
def _read_shares(
    kv, out, row_table, kv_stride_block, start, end, NUM_BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    head, share = tl.program_id(0), 2 * BLOCK_SIZE * HEAD_DIM
    places, is_wanted = share_of_blocks(
        kv, kv_stride_block, row_table, head, start, end, NUM_BLOCKS, HEAD_DIM, BLOCK_SIZE
    )
    inside = tl.arange(0, 2 * BLOCK_SIZE * HEAD_DIM)
    numbers = tl.load(places[:, None] + inside[None, :], mask=is_wanted[:, None], other=7.0)
    blocks = tl.arange(0, NUM_BLOCKS) * (tl.num_programs(0) * share)
    tl.store(out + blocks[:, None] + head * share + inside[None, :], numbers)


@pytest.mark.parametrize(
    ("start", "end", "wanted"), [(0, 1, 1), (0, 64, 4), (64, 96, 2), (64, 97, 3), (256, 299, 3), (128, 128, 0)]
)
def test_what_is_fetched_are_the_blocks_in_front_of_the_end(
    device: torch.device, start: int, end: int, wanted: int
) -> None:
    """All of them, by two heads; of a sequence whose table has entries outside of the pool behind its last block."""
    case = paged_case([20, 300, 70], 2, HEAD_DIM, torch.float32, device)
    out = torch.zeros(4, 2, 16, 2, HEAD_DIM, device=device)
    _read_shares[(2,)](
        case.kv, out, case.table[1], case.kv.stride(0), start, end, NUM_BLOCKS=4, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=16
    )
    blocks = case.table[1, start // 16 :][:wanted]
    assert torch.equal(out[:wanted].view(torch.int32), case.kv[blocks].view(torch.int32))
    assert bool((out[wanted:] == 7.0).all())


def test_only_what_is_aligned_is_fetched() -> None:
    pool = torch.zeros(4, 3, 2, 16, 2, 64, dtype=torch.float16)
    of_fp8 = as_stored(pool.float(), FP8)
    assert [fetched_blocks(pool[:, 1], 64, tiles) for tiles in (None, 0, 1, 2, 3)] == [0, 0, 4, 8, 16]
    assert fetched_blocks(of_fp8[:, 2], 128, 1) == 8
    assert fetched_blocks(torch.zeros(4, 2, 4, 2, 64, dtype=torch.float16), 32, 1) == 8
    assert fetched_blocks(torch.zeros(4, 2, 1, 2, 33, dtype=torch.float16), 64, 1) == 0, "132 bytes of a head"
    assert fetched_blocks(torch.zeros(1 + 4 * 4096, dtype=torch.float16)[1:].view(4, 2, 16, 2, 64), 64, 1) == 0


@pytest.mark.skipif(not ON_CARD, reason="compiled for a card")
def test_before_the_wait_nothing_is_loaded_but_places(device: torch.device) -> None:
    if not of_rows.launches_early(device):
        pytest.skip("kernels of this card are not launched early")
    for tiles_ahead in (None, 2):
        attended(device, torch.float16, 1, tiles_ahead)
    texts = [
        found.asm["ptx"] for caches in of_rows._attend_piece.device_caches.values() for found in caches[0].values()
    ]
    early = [text.split("griddepcontrol.wait")[0] for text in texts]
    assert any("prefetch.L2" in text for text in early)
    assert any("ld.global" not in text for text in early), "nor that, unless it is asked for"
    for text in early:
        assert "st.global" not in text
        assert text.count("ld.global") == text.count("ld.global.cg")
