"""How a step's prompt tokens lie for the CUDA attention: every token once, heads of one length side by side."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.cuda.slots import CudaSlots
from replicas.cuda.step import ChunkLayout, Launches, build_cuda_inputs, fresh_runs
from scheduler.plan import SampleTarget, Slice, StepPlan

SHARING: Any = SimpleNamespace(
    most_pieces=lambda rows: rows + 3, tile_len=lambda rows: 64, share_out=lambda positions: positions.new_zeros(90, 4)
)


def chunk(slot: int, start: int, length: int, *, scored: bool = False, num_targets: int = 1) -> Slice:
    ids = tuple(1000 * slot + start + i for i in range(length))
    targets = tuple(SampleTarget(slot, choice) for choice in range(num_targets))
    return Slice.of_prompt(f"r{slot}", slot, start, ids, targets, ids[1:] if scored else None)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_lie_where_the_launches_say(seed: int) -> None:
    rng = random.Random(seed)
    chunks = tuple(
        chunk(slot, rng.choice([0, 0, 0, 0, 7, 512]), rng.choice([1, 20, 255, 2047, 2048, 2049, 2600, 3072, 3100]),
              scored=seed % 5 == 0 and slot == 1, num_targets=rng.randrange(3))
        for slot in range(rng.randrange(1, 14))
    )  # fmt: skip
    rows = tuple(Slice(f"d{i}", 0, 20 + i, 30 + i) for i in range(rng.randrange(4)))
    slots = CudaSlots(32, 250, 4000, torch.device("cpu"))
    slots.last_token[:] = torch.arange(33) + 50_000
    inputs = build_cuda_inputs(StepPlan(0, (), (), (), (*rows, *chunks)), slots, SHARING, has_fresh=True)
    flat = list(zip(inputs.step.token_slots.tolist(), inputs.step.positions.tolist(), strict=True))
    tokens = {(c.slot, c.start + i): token for c in chunks for i, token in enumerate(c.token_ids)}
    tokens |= {(row.slot, row.start): 50_000 + row.slot for row in rows}
    assert sorted(flat) == sorted(tokens)
    assert inputs.input_ids.tolist() == [tokens[place] for place in flat]
    launches = Launches.unpack(inputs.step.layout)
    covered = list(range(launches.num_rows))
    assert flat[: launches.num_rows] == [(row.slot, row.start) for row in rows]
    for first, length, count in launches.fresh:
        for head in range(first, first + length * count, length):
            assert flat[head : head + length] == [(flat[head][0], i) for i in range(length)]
            covered += range(head, head + length)
    for first, length, position in inputs.step.chunks.tolist()[: launches.num_chunks]:
        assert flat[first : first + length] == [(flat[first][0], position + i) for i in range(length)]
        assert length <= launches.longest_chunk
        covered += range(first, first + length)
    assert sorted(covered) == list(range(len(flat)))
    last = [(row.slot, row.start) for row in rows]
    last += [(c.slot, c.start + len(c.token_ids) - 1) for c in chunks for _ in c.sampled_choices]
    assert [flat[row] for row in inputs.logit_rows.tolist()] == last
    if any(c.scored_ids is not None for c in chunks):  # scores are found by the plan's order
        assert flat[launches.num_rows :] == [(c.slot, c.start + i) for c in chunks for i in range(len(c.token_ids))]


def test_heads_of_one_length_are_few_launches_of_shapes_known_before() -> None:
    chunks = [chunk(slot, 0, 2048 + slot) for slot in range(11)] + [chunk(14, 0, 6500), chunk(15, 0, 2047)]
    layout = ChunkLayout.of(chunks, 5, has_fresh=True)
    runs = [(2048, 8), (2048, 2), (2048, 1), (6144, 1)]
    assert [(length, count) for _, length, count in layout.fresh] == runs
    assert [first for first, _, _ in layout.fresh] == [5, 5 + 2048 * 8, 5 + 2048 * 10, 5 + 2048 * 11]
    assert ChunkLayout.of(chunks, 5, has_fresh=False).fresh == ()
    num_tokens = sum(len(c.token_ids) for c in chunks)
    assert set(runs) <= set(fresh_runs(num_tokens, 6500))


def test_the_library_is_prepared_for_no_more_than_a_step_can_have() -> None:
    assert fresh_runs(2047, 9000) == ()
    assert fresh_runs(9000, 2047) == ()
    assert fresh_runs(4096, 32768) == ((2048, 2), (2048, 1), (3072, 1), (4096, 1))
    assert fresh_runs(8192, 2500) == ((2048, 4), (2048, 2), (2048, 1))


@pytest.mark.parametrize("seed", range(20))
def test_every_run_of_a_step_was_prepared(seed: int) -> None:
    rng = random.Random(seed)
    chunks = [chunk(slot, 0, rng.randrange(1, 9000)) for slot in range(rng.randrange(1, 9))]
    layout = ChunkLayout.of(chunks, 0, has_fresh=True)
    prepared = fresh_runs(sum(len(c.token_ids) for c in chunks), max(len(c.token_ids) for c in chunks))
    assert {(length, count) for _, length, count in layout.fresh} <= set(prepared)


@pytest.mark.parametrize("length", [37, 23])  # those that CudaRunner.warm_up compiles the layers with
def test_no_two_sizes_of_the_step_that_is_compiled_are_equal(length: int) -> None:
    """The compiler takes equal sizes for one and the same, and compiles anew where they differ."""
    slots = CudaSlots(256, 200, 3000, torch.device("cpu"))
    step = build_cuda_inputs(StepPlan(0, (), (), (), (chunk(0, 0, length),)), slots, SHARING, has_fresh=True).step
    sizes = [length] + [size for tensor in step for size in tensor.shape]
    assert len(sizes) == len(set(sizes)), sizes
    assert all(tensor.storage_offset() == 0 for tensor in step[1:])
