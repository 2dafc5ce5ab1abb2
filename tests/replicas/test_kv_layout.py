"""What a pool's layout may vary in: nothing by default; an extra layer goes wherever its block goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from replicas.kv.host_pool import HostPool
from replicas.kv.kv_digest import BlockDigester
from replicas.kv.kv_pool import KvLayout, KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model_identity import ModelIdentity
from replicas.model_support import UnsupportedModel
from scheduler.plan import BlockCopy, BlockSwap, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model, tiny_settings

CPU = torch.device("cpu")
PROMPT = tuple((29 * i + 3) % 512 for i in range(21))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return load_model(tiny_settings("decode", folder).model, CPU)


@pytest.mark.parametrize(
    ("layout", "text", "bytes_per_token"),
    [
        (KvLayout(30, 16, 3, 64, torch.float32), "30x2x16x3x64:float32", 46_080),  # SmolLM2-135M
        (KvLayout(32, 16, 8, 128, torch.bfloat16), "32x2x16x8x128:bfloat16", 131_072),  # Llama-3.1-8B
        (KvLayout(28, 32, 2, 128, torch.float16), "28x2x32x2x128:float16", 28_672),  # Qwen2.5-1.5B
    ],
)
def test_by_default_texts_bytes_and_shapes_are_what_they_were(
    layout: KvLayout, text: str, bytes_per_token: int
) -> None:
    """Engines of both kinds may meet: what they tell each other must not change."""
    assert layout.describe() == text
    assert layout.bytes_per_token == bytes_per_token
    assert layout.block_bytes == bytes_per_token * layout.block_size
    identity = ModelIdentity("w", "c", "t", "d")
    assert str(replace(identity, kv=layout.describe())) == f"weights=w config=c tokenizer=t dtype=d kv={text}"
    pool = KvPool(layout, 2, CPU)
    assert pool.tensor.shape == (2, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    assert pool.tensor[0].nbytes == layout.block_bytes
    assert pool.planes_per_block == 2 * layout.num_layers


def test_whatever_differs_is_in_the_text() -> None:
    base = KvLayout(4, 16, 8, 64, torch.bfloat16)
    others = [
        replace(base, dtype=torch.float8_e4m3fn),
        replace(base, num_extra_layers=1),
        replace(base, num_layers=5),
        replace(base, num_layers=3, num_extra_layers=1),
        replace(base, head_groups=2),
        replace(base, head_groups=8),
    ]
    texts = [layout.describe() for layout in (base, *others)]
    assert texts == [
        "4x2x16x8x64:bfloat16", "4x2x16x8x64:float8_e4m3fn", "4+1x2x16x8x64:bfloat16", "5x2x16x8x64:bfloat16",
        "3+1x2x16x8x64:bfloat16", "4x2x16x8/2x64:bfloat16", "4x2x16x8/8x64:bfloat16",
    ]  # fmt: skip
    for text in texts:
        identity = ModelIdentity("w", "c", "t", "d", kv=text)
        assert ModelIdentity.parse(str(identity)) == identity


def test_bytes_follow_the_layout() -> None:
    base = KvLayout(4, 16, 8, 64, torch.bfloat16)
    assert replace(base, dtype=torch.float8_e4m3fn).block_bytes * 2 == base.block_bytes
    assert replace(base, num_extra_layers=2).block_bytes * 4 == base.block_bytes * 6
    grouped = replace(base, head_groups=4)
    assert grouped.block_bytes == base.block_bytes
    pool = KvPool(grouped, 3, CPU)
    assert pool.tensor.shape == (3, 4, 4, 2, 16, 2, 64)
    assert pool.tensor[1, 2].is_contiguous(), "a shard's part of a block is one range"
    pool.tensor.fill_(1)
    pool.clear(torch.tensor([0]), [(1, 5)])
    assert not pool.tensor[0].any()
    assert not pool.tensor[1, :, :, :, 5:].any()
    assert pool.tensor[1, :, :, :, :5].all()
    assert pool.tensor[2].all()
    assert pool.planes().shape == (3 * pool.planes_per_block, 16 * 2 * 64)


@pytest.mark.parametrize("wrong", [{"num_extra_layers": -1}, {"head_groups": 0}, {"head_groups": 3}])
def test_a_layout_that_contradicts_itself_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        KvLayout(4, 16, 8, 64, torch.bfloat16, **wrong)


# -- an extra layer --------------------------------------------------------------------------------------


def extra_pool(loaded: LoadedModel, num_blocks: int = 12) -> KvPool:
    layout = replace(loaded.kv_layout(8), num_extra_layers=1)
    pool = KvPool(layout, num_blocks, CPU)
    assert pool.tensor.shape[1] == loaded.num_layers + 1
    pool.tensor[:, -1].normal_(generator=torch.Generator().manual_seed(5))
    return pool


def test_an_extra_layer_is_swapped_copied_and_cleared_with_its_block(loaded: LoadedModel) -> None:
    pool = extra_pool(loaded)
    pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
    before = pool.tensor.clone()
    host = HostPool(pool, 3)
    host.move(StepPlan(0, (), (), (), (), swap_outs=(BlockSwap(4, 0), BlockSwap(7, 2))))
    pool.tensor[4], pool.tensor[7] = 0, 0
    moved = host.move(StepPlan(1, (), (), (), (), swap_ins=(BlockSwap(9, 0), BlockSwap(1, 2))))
    assert moved is not None
    assert not moved.damaged()
    assert torch.equal(pool.tensor[9], before[4])
    assert torch.equal(pool.tensor[1], before[7])
    pool.copy_block(9, 10)
    assert torch.equal(pool.tensor[10], before[4])
    pool.clear(torch.tensor([9]), [(10, 3)])
    assert not pool.tensor[9].any()
    assert torch.equal(pool.tensor[10, :, :, :3], before[4, :, :, :3])
    assert not pool.tensor[10, :, :, 3:].any()


def test_the_digest_covers_the_extra_layer(loaded: LoadedModel) -> None:
    pool = extra_pool(loaded)
    digester = BlockDigester.for_pool(pool.tensor)
    assert digester.words_per_block * 4 == pool.layout.block_bytes
    before = digester.digest_blocks(pool.tensor, [3, 5])
    pool.tensor[5, -1, 1, 7, 1, -1] += 1
    assert digester.digest_blocks(pool.tensor, [3, 5]) != before
    pool.tensor[5, -1, 1, 7, 1, -1] -= 1
    pool.tensor[6, -1] = 0
    assert digester.digest_blocks(pool.tensor, [3, 5]) != digester.digest_blocks(pool.tensor, [5, 3])


def tokens_over(loaded: LoadedModel, pool: KvPool) -> tuple[list[int], ModelRunner]:
    """A prompt in two chunks and eight rows; in between its blocks are elsewhere, one of them copied."""
    runner = ModelRunner(loaded, pool, num_slots=2, max_model_len=64, num_host_blocks=4)
    init = SlotInit(0, 0, SamplingParams(temperature=0.0), None)
    chunk = Slice.of_prompt("r", 0, 0, PROMPT[:13])
    runner.launch(StepPlan(0, (init,), (TableWrite(0, 0, (2, 9, 4, 7)),), (), (chunk,)))
    chunk = Slice.of_prompt("r", 0, 13, PROMPT[13:], (SampleTarget(0, 0),))
    tokens = [*runner.launch(StepPlan(1, (), (), (), (chunk,))).result().tokens]
    runner.launch(StepPlan(2, (), (), (), (), swap_outs=(BlockSwap(2, 0), BlockSwap(9, 1), BlockSwap(4, 3))))
    for block_id in (2, 9, 4):
        pool.tensor[block_id] = torch.nan
    swap_ins = (BlockSwap(5, 0), BlockSwap(3, 1), BlockSwap(8, 3))
    for index in range(8):
        moves = (TableWrite(0, 0, (5, 3, 8, 7)),) if not index else ()
        copies = (BlockCopy(8, 1),) if index == 2 else ()
        moves = (TableWrite(0, 2, (1,)),) if index == 2 else moves
        row = Slice("r", 0, 0, len(PROMPT) + index)
        plan = StepPlan(3 + index, (), moves, copies, (row,), swap_ins=() if index else swap_ins)
        tokens += runner.launch(plan).result().tokens
    return [token.token_id for token in tokens], runner


def test_a_model_computes_the_same_over_a_pool_with_an_extra_layer(loaded: LoadedModel) -> None:
    expected, _ = tokens_over(loaded, KvPool(loaded.kv_layout(8), 12, CPU))
    pool = extra_pool(loaded)
    before = pool.tensor[:, -1].clone()
    tokens, _ = tokens_over(loaded, pool)
    assert tokens == expected
    assert len(set(tokens)) > 3
    # Its own content went along: out, in, and into the copy; but for the tails that chunks clear behind their ends.
    assert torch.equal(pool.tensor[5, -1], before[2])
    assert torch.equal(pool.tensor[3, -1, :, :5], before[9, :, :5])
    assert torch.equal(pool.tensor[1, -1, :, :5], before[4, :, :5])


# -- a type of its own -----------------------------------------------------------------------------------


def test_a_pool_may_have_another_type_than_its_model(loaded: LoadedModel) -> None:
    """Attention sees what the pool holds: the same numbers whether a prompt comes whole or in chunks."""
    pools, logits = [], []
    for cuts in ((0, 21), (0, 8, 13, 21)):
        pool = KvPool(replace(loaded.kv_layout(8), dtype=torch.bfloat16), 6, CPU)
        runner = ModelRunner(loaded, pool, num_slots=1, max_model_len=32)
        init = SlotInit(0, 0, SamplingParams(temperature=0.0), None)
        runner.launch(StepPlan(0, (init,), (TableWrite(0, 0, (3, 1, 5)),), (), ()))
        for start, end in pairwise(cuts):
            targets = (SampleTarget(0, 0),) if end == len(PROMPT) else ()
            chunk = Slice.of_prompt("r", 0, start, PROMPT[start:end], targets)
            given = runner.logits(StepPlan(1, (), (), (), (chunk,)))
        pools.append(pool.tensor.float())
        logits.append(given)
    assert pools[0].abs().sum() > 0
    torch.testing.assert_close(pools[0], pools[1], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(logits[0], logits[1], atol=5e-2, rtol=5e-2)
    exact, _ = tokens_over(loaded, KvPool(loaded.kv_layout(8), 12, CPU))
    assert int(logits[0].argmax()) == exact[0]


def test_heads_in_groups_are_refused_by_who_cannot_read_them(loaded: LoadedModel) -> None:
    pool = KvPool(replace(loaded.kv_layout(8), head_groups=2), 4, CPU)
    with pytest.raises(UnsupportedModel, match="heads in 2 groups: attention here knows one group only"):
        ModelRunner(loaded, pool, num_slots=1, max_model_len=32)
