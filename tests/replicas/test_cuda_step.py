"""How a step's prompt tokens lie for the CUDA attention: every token once, heads of one length side by side."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.cuda.cuda_slots import CudaSlots
from replicas.cuda.cuda_step import ChunkLayout, Launches, build_cuda_inputs, tokens_while_launching
from scheduler.plan import DecodeRow, PrefillChunk, SampleTarget, StepPlan

SHARING: Any = SimpleNamespace(
    most_pieces=lambda rows: rows + 3, tile_len=lambda rows: 64, share_out=lambda positions: positions.new_zeros(90, 4)
)


def chunk(slot: int, start: int, length: int, *, scored: bool = False, num_targets: int = 1) -> PrefillChunk:
    ids = tuple(1000 * slot + start + i for i in range(length))
    targets = tuple(SampleTarget(slot, choice) for choice in range(num_targets))
    return PrefillChunk(f"r{slot}", slot, start, ids, targets, ids[1:] if scored else None)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_lie_where_the_launches_say(seed: int) -> None:
    rng = random.Random(seed)
    chunks = tuple(
        chunk(slot, rng.choice([0, 0, 0, 7, 512]), rng.choice([1, 20, 255, 512, 513, 600, 767, 768, 1024, 1300]),
              scored=seed % 5 == 0 and slot == 1, num_targets=rng.randrange(3))
        for slot in range(rng.randrange(1, 14))
    )  # fmt: skip
    rows = tuple(DecodeRow(f"d{i}", 0, 20 + i, 30 + i) for i in range(rng.randrange(4)))
    slots = CudaSlots(32, 200, 3000, torch.device("cpu"))
    slots.last_token[:] = torch.arange(33) + 50_000
    inputs = build_cuda_inputs(StepPlan(0, (), (), (), chunks, rows), slots, SHARING, has_fresh=True)
    flat = list(zip(inputs.step.token_slots.tolist(), inputs.step.positions.tolist(), strict=True))
    tokens = {(c.slot, c.start + i): token for c in chunks for i, token in enumerate(c.token_ids)}
    tokens |= {(row.slot, row.position): 50_000 + row.slot for row in rows}
    assert sorted(flat) == sorted(tokens)
    assert inputs.input_ids.tolist() == [tokens[place] for place in flat]
    launches = Launches.unpack(inputs.step.layout)
    covered = list(range(launches.num_rows))
    assert flat[: launches.num_rows] == [(row.slot, row.position) for row in rows]
    for first, length, count in launches.fresh:
        for head in range(first, first + length * count, length):
            assert flat[head : head + length] == [(flat[head][0], i) for i in range(length)]
            covered += range(head, head + length)
    for first, length, position in inputs.step.chunks.tolist()[: launches.num_chunks]:
        assert flat[first : first + length] == [(flat[first][0], position + i) for i in range(length)]
        assert length <= launches.longest_chunk
        covered += range(first, first + length)
    assert sorted(covered) == list(range(len(flat)))
    last = [(row.slot, row.position) for row in rows]
    last += [(c.slot, c.start + len(c.token_ids) - 1) for c in chunks for _ in c.targets]
    assert [flat[row] for row in inputs.logit_rows.tolist()] == last
    if any(c.scored_ids is not None for c in chunks):  # scores are found by the plan's order
        assert flat[launches.num_rows :] == [(c.slot, c.start + i) for c in chunks for i in range(len(c.token_ids))]


def test_heads_of_one_length_are_one_launch_for_each_power_of_two() -> None:
    chunks = [chunk(slot, 0, 600 + slot) for slot in range(13)] + [chunk(14, 0, 1100), chunk(15, 0, 300)]
    layout = ChunkLayout.of(chunks, 5, has_fresh=True)
    runs = [(512, 8), (512, 4), (512, 1), (1024, 1)]
    assert [(length, count) for _, length, count in layout.fresh] == runs
    assert [first for first, _, _ in layout.fresh] == [5, 5 + 512 * 8, 5 + 512 * 12, 5 + 512 * 13]
    assert ChunkLayout.of(chunks, 5, has_fresh=False).fresh == ()


@pytest.mark.parametrize("length", [37, 23])  # those that CudaRunner.warm_up compiles the layers with
def test_no_two_sizes_of_the_step_that_is_compiled_are_equal(length: int) -> None:
    """The compiler takes equal sizes for one and the same, and compiles anew where they differ."""
    slots = CudaSlots(256, 200, 3000, torch.device("cpu"))
    step = build_cuda_inputs(StepPlan(0, (), (), (), (chunk(0, 0, length),), ()), slots, SHARING, has_fresh=True).step
    sizes = [length] + [size for tensor in step for size in tensor.shape]
    assert len(sizes) == len(set(sizes)), sizes
    assert all(tensor.storage_offset() == 0 for tensor in step[1:])


def test_the_larger_the_model_the_fewer_tokens_hide_a_launch_by_hand() -> None:
    llama, qwen = tokens_while_launching(8_030_000_000, 32), tokens_while_launching(596_000_000, 28)
    assert 1024 < llama < 2048 < qwen
