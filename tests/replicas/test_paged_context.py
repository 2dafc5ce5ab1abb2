"""What attention reads out of the pool and writes into it is, bit by bit, what indexing by layer and kind gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from replicas.kv.kv_pool import KvLayout, KvPool
from replicas.model.paged_context import PagedContext, PagedStep
from replicas.model.step_inputs import build_step_inputs
from replicas.sampling.slot_state import SlotState
from scheduler.plan import SampleTarget, Slice, StepPlan, TableWrite

LAYOUT = KvLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
LAYERS = range(LAYOUT.num_layers)


def random_pool(dtype: torch.dtype = torch.float32) -> KvPool:
    torch.manual_seed(1)
    pool = KvPool(KvLayout(3, 4, 2, 8, dtype), num_blocks=20, device=torch.device("cpu"))
    pool.tensor.normal_()
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_gathered_context(layer: int, dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    table = torch.tensor([[7, 3, 19], [0, 0, 5]])
    context = PagedContext(pool, table, torch.ones(2, 1, 1, 12, dtype=torch.bool))
    for kind, gathered in enumerate(context.keys_values(layer)):
        expected = pool.tensor[:, layer, kind][table].flatten(1, 2).transpose(1, 2)
        assert torch.equal(gathered, expected)
        assert gathered.stride() == expected.stride()  # attention takes the same path


def test_a_layer_reads_what_the_layer_before_wrote_nothing_of() -> None:
    """The memory of the copies is shared by the layers: each call must fill all of it."""
    pool = random_pool()
    table = torch.tensor([[2, 9]])
    context = PagedContext(pool, table, torch.ones(1, 1, 1, 8, dtype=torch.bool))
    for layer in (2, 0, 1, 0):
        keys, values = context.keys_values(layer)
        assert torch.equal(keys[0, :, 3], pool.tensor[2, layer, 0, 3])
        assert torch.equal(values[0, :, 5], pool.tensor[9, layer, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_repeats", [1, 3])
def test_the_mask_gives_what_a_boolean_mask_gives(num_repeats: int, dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    visible = torch.tensor([[True] * 6 + [False] * 2, [True] * 7 + [False]])
    context = PagedContext(pool, torch.tensor([[1, 4]]), visible)
    keys, values = context.keys_values(1)
    query = torch.randn(1, 2, 2 * num_repeats, 8, dtype=dtype)
    expected = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible.repeat(num_repeats, 1))
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=context.mask(num_repeats))
    assert torch.equal(out, expected)


def test_written_tokens_lie_where_the_tables_say() -> None:
    """Rows of two lengths and a chunk, against indexing by block and offset."""
    pool = random_pool()
    slots = SlotState(num_slots=4, max_blocks=8, max_len=128)
    plan = StepPlan(
        step_id=0,
        slot_inits=(),
        table_writes=(TableWrite(0, 0, (5, 11)), TableWrite(2, 0, (17,)), TableWrite(3, 0, (8, 1, 13))),
        copies=(),
        slices=(
            Slice("a", 0, 0, 6),
            Slice("b", 0, 2, 3),
            Slice.of_prompt("prompt", 3, 2, (10, 11, 12, 13, 14), (SampleTarget(3, 0),)),
        ),
    )
    slots.apply(plan)
    inputs = build_step_inputs(plan, slots, LAYOUT.block_size)
    step = PagedStep(pool, inputs)
    expected = pool.tensor.clone()
    for layer in LAYERS:
        keys, values = torch.randn(7, 2, 8), torch.randn(7, 2, 8)
        expected[:, layer, 0][inputs.write_blocks, inputs.write_offsets] = keys
        expected[:, layer, 1][inputs.write_blocks, inputs.write_offsets] = values
        step.write(layer, keys, values)
    assert torch.equal(pool.tensor, expected)
    assert inputs.write_blocks.tolist() == [11, 17, 8, 8, 1, 1, 1]
    assert inputs.write_offsets.tolist() == [2, 3, 2, 3, 0, 1, 2]


def test_rows_that_lie_apart_keep_their_places() -> None:
    """A short context between two long ones: its group is a slice, theirs an index."""
    slots = SlotState(num_slots=3, max_blocks=16, max_len=256)
    rows = (Slice("a", 0, 0, 40), Slice("b", 0, 1, 2), Slice("c", 0, 2, 45))
    inputs = build_step_inputs(StepPlan(0, (), (), (), rows), slots, block_size=4)
    numbers = torch.arange(3)
    assert sorted(numbers[group.rows].tolist() for group in inputs.groups) == [[0, 2], [1]]
