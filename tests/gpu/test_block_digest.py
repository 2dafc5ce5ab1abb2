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
