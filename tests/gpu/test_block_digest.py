"""The digest kernel gives the very sums of `replicas.kv.kv_digest`."""

from __future__ import annotations

import pytest
import torch

from replicas.kv.kv_digest import BlockDigester

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.block_digest import sum_blocks

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("num_words", [1, 1024, 8192, 20_001])
def test_equals_the_reference(device: torch.device, num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    words = torch.randint(-(2**31), 2**31, (6, num_words), generator=generator, dtype=torch.int64).to(torch.int32)
    block_ids = torch.tensor([4, 0, 5, 4])
    expected = BlockDigester(num_words).sum_blocks(words, block_ids)
    assert sum_blocks(words.to(device), block_ids.to(device)).cpu().tolist() == expected.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_beside_steps_it_waits_for_none() -> None:
    """Blocks of a prompt's finished chunks are digested while the next one is computed."""
    pool = torch.randn(64, 1 << 16, device="cuda")
    digester = BlockDigester.for_pool(pool, is_beside_steps=True)
    expected = BlockDigester.for_pool(pool.cpu()).digest_blocks(pool.cpu(), [9, 3, 60])
    assert digester.digest_blocks(pool, [9, 3, 60]) == expected
    step_ended = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # some two seconds
    step_ended.record()
    assert digester.digest_blocks(pool, [9, 3, 60]) == expected
    assert not step_ended.query(), "it has waited for the step"
    torch.cuda.synchronize()
