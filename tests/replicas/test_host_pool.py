"""Blocks go to host memory and come back bit by bit, and what does not is told."""

from __future__ import annotations

import pytest
import torch

from replicas.kv.host_pool import HostPool
from replicas.kv.kv_pool import KvLayout, KvPool
from scheduler.plan import BlockSwap, StepPlan

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
OUT = (BlockSwap(7, 0), BlockSwap(2, 3), BlockSwap(3, 4), BlockSwap(4, 5))
BACK = (BlockSwap(9, 4), BlockSwap(10, 5), BlockSwap(1, 0), BlockSwap(0, 3))


def pools() -> tuple[KvPool, HostPool]:
    pool = KvPool(LAYOUT, 12, torch.device("cpu"))
    pool.tensor.normal_(generator=torch.Generator().manual_seed(3))
    return pool, HostPool(pool, 6)


def out_and_back(kind: str) -> tuple[StepPlan, StepPlan]:
    if kind == "swaps":
        return StepPlan(0, (), (), (), (), swap_outs=OUT), StepPlan(1, (), (), (), (), swap_ins=BACK)
    return StepPlan(0, (), (), (), (), saves=OUT), StepPlan(1, (), (), (), (), fetches=BACK)


@pytest.mark.parametrize("kind", ["swaps", "cached blocks"])
def test_what_comes_back_is_what_went(kind: str) -> None:
    pool, host = pools()
    before = pool.tensor.clone()
    out, back = out_and_back(kind)
    gone = host.move(out)
    assert gone is not None
    assert not gone.damaged()
    for swap in OUT:
        pool.tensor[swap.device] = torch.nan
    came = host.move(back)
    assert came is not None
    assert not came.is_on_the_way
    assert not came.damaged()
    source_of = {swap.host: swap.device for swap in OUT}
    for swap in BACK:
        assert torch.equal(pool.tensor[swap.device], before[source_of[swap.host]])
    assert torch.equal(pool.tensor[11], before[11])


@pytest.mark.parametrize("kind", ["swaps", "cached blocks"])
def test_what_changes_there_is_told(kind: str) -> None:
    _, host = pools()
    out, back = out_and_back(kind)
    host.move(out)
    host.tensor[5].view(torch.uint8)[1, 1, 2, 0, 6] ^= 1
    came = host.move(back)
    assert came is not None
    assert came.damaged() == (BlockSwap(10, 5),)


def test_blocks_that_changed_places_are_told() -> None:
    _, host = pools()
    out, back = out_and_back("cached blocks")
    host.move(out)
    host.tensor[[3, 4]] = host.tensor[[4, 3]]
    came = host.move(back)
    assert came is not None
    assert came.damaged() == (BlockSwap(9, 4), BlockSwap(0, 3))


def test_a_plan_that_moves_nothing_costs_nothing() -> None:
    pool, host = pools()
    assert host.move(StepPlan(0, (), (), (), ())) is None
    none = HostPool(pool, 0)
    assert none.move(StepPlan(0, (), (), (), ())) is None
