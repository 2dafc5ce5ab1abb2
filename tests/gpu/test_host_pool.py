"""Host memory on a card: copies of cached blocks in a stream of their own, beside whatever the card computes."""

from __future__ import annotations

import pytest
import torch

from replicas.kv.host_pool import HostPool
from replicas.kv.kv_pool import KvLayout, KvPool
from scheduler.plan import BlockSwap, StepPlan

LAYOUT = KvLayout(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
NUM_BLOCKS = 256
SAVES = tuple(BlockSwap(device, 127 - device if device < 64 else device) for device in range(128))


def saved() -> tuple[KvPool, HostPool, torch.Tensor]:
    """128 blocks are on the host, and the device's are something else. What they were."""
    pool = KvPool(LAYOUT, NUM_BLOCKS, torch.device("cuda"))
    pool.tensor.normal_()
    before = pool.tensor[:128].clone()
    host = HostPool(pool, 128)
    moved = host.move(StepPlan(0, (), (), (), (), saves=SAVES))
    assert moved is not None
    assert moved.is_on_the_way
    assert not moved.damaged()
    pool.tensor[:128] = torch.nan
    return pool, host, before


def test_cached_blocks_go_and_come_back() -> None:
    pool, host, before = saved()
    for swap in SAVES:
        assert torch.equal(host.tensor[swap.host], before[swap.device].cpu())
    fetches = tuple(BlockSwap(128 + swap.device, swap.host) for swap in SAVES)
    moved = host.move(StepPlan(1, (), (), (), (), fetches=fetches))
    assert moved is not None
    assert moved.damaged() == ()
    assert torch.equal(pool.tensor[128:], before)


def test_a_flipped_bit_is_told() -> None:
    _, host, _ = saved()
    host.tensor[77].view(torch.uint8)[31, 1, 15, 7, 200] ^= 0x20
    fetches = tuple(BlockSwap(128 + swap.device, swap.host) for swap in SAVES)
    moved = host.move(StepPlan(1, (), (), (), (), fetches=fetches))
    assert moved is not None
    assert [swap.host for swap in moved.damaged()] == [77]


def test_they_move_beside_the_step_and_are_waited_for() -> None:
    """The step computes for longer than the copies take: these end before it."""
    pool, host, before = saved()
    fetches = tuple(BlockSwap(128 + swap.device, swap.host) for swap in SAVES)
    moved = host.move(StepPlan(1, (), (), (), (), fetches=fetches))
    assert moved is not None
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    end = torch.cuda.Event()
    end.record()
    assert moved.damaged() == ()
    assert not end.query(), "they waited for the step"
    torch.cuda.synchronize()
    assert torch.equal(pool.tensor[128:], before)


def test_who_gives_way_comes_behind_a_save_into_the_same_host_block() -> None:
    pool, host, _ = saved()
    for number in range(20):
        pool.tensor[:2].normal_()
        first, second = pool.tensor[:2].clone()
        assert not torch.equal(first, second)
        host.move(StepPlan(2 * number, (), (), (), (), saves=(BlockSwap(0, 5),)))
        moved = host.move(StepPlan(2 * number + 1, (), (), (), (), swap_outs=(BlockSwap(1, 5),)))
        assert moved is not None
        moved.damaged()
        assert torch.equal(host.tensor[5], second.cpu())


@pytest.mark.parametrize("kind", ["swap_ins", "fetches"])
def test_bytes_a_second(kind: str) -> None:
    """Prints them: no more than it is asked to hold is held."""
    _, host, _ = saved()
    swaps = tuple(BlockSwap(128 + index, index) for index in range(128))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for number in range(10):
        moved = host.move(StepPlan(number, (), (), (), (), **{kind: swaps}))
        assert moved is not None
        assert not moved.damaged()
    end.record()
    torch.cuda.synchronize()
    print(f"{kind}: {10 * 128 * LAYOUT.block_bytes / begin.elapsed_time(end) / 1e6:.1f} GB/s with digests")
