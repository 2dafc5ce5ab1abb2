"""A library's attention behind earlier tokens, its parts by themselves and together, against attention by definition.

Without a card a function by definition stands for the library: what is seen then are the kernels around it.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.paged_case import BLOCK_SIZE, TOLERANCE, attention, by_definition, paged_case, relative_error

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import attention_behind
from replicas.cuda.attention_behind import attend_behind, library_attention_of
from replicas.kernels.earlier_keys import earlier_keys
from replicas.kernels.kv_write import write_kv
from replicas.kernels.merged_attention import merge_attention
from replicas.stored_numbers import FP8

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention_behind, "library_attention_of", by_definition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(1, 64), (3, 96), (8, 128)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 48, 70])
def test_earlier_keys_come_in_a_row(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], num_tokens: int
) -> None:
    """From blocks in any order, of a slot in the middle; and zeros for a chunk that is padding, whatever its table."""
    num_kv_heads, head_dim = heads
    case = paged_case([30, 90, 5], num_kv_heads, head_dim, dtype, device)
    slot = torch.tensor([1, 7], dtype=torch.int32, device=device)
    chunk = torch.tensor([3, 12, num_tokens], dtype=torch.int32, device=device)
    keys, values = earlier_keys(case.kv, case.table, slot, chunk, num_tokens, dtype)
    assert torch.equal(keys.cpu(), case.keys[1][:num_tokens])
    assert torch.equal(values.cpu(), case.values[1][:num_tokens])
    case.table.fill_(10**9)
    chunk[1] = 0
    for zeros in earlier_keys(case.kv, case.table, slot, chunk, num_tokens, dtype):
        assert zeros.shape == (num_tokens, num_kv_heads, head_dim)
        assert not zeros.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no numbers of 8 bits")
@pytest.mark.parametrize("dtype", DTYPES)
def test_earlier_keys_of_8_bits_are_the_same_numbers(device: torch.device, dtype: torch.dtype) -> None:
    pool = torch.randn(6, 2, 16, 8, 128, device=device).to(FP8)
    table = torch.tensor([[4, 0, 5, 2]], device=device)
    slot, chunk = (torch.tensor(row, dtype=torch.int32, device=device) for row in ([0], [0, 9, 64]))
    found = earlier_keys(pool, table, slot, chunk, 64, dtype)
    for kind in (0, 1):
        assert torch.equal(found[kind], pool[table[0], kind].reshape(64, 8, 128).to(dtype))


@pytest.mark.parametrize("heads", [(1, 64), (9, 96), (32, 128)])
def test_merged_parts_are_the_whole(device: torch.device, heads: tuple[int, int]) -> None:
    """Also where one part has next to nothing of the weight, or its scores are far from the other's."""
    num_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_heads)
    first, second = torch.randn(2, 7, num_heads, head_dim, generator=generator)
    lse = torch.randn(2, num_heads, 7, generator=generator) * 4
    lse[0, :, 2], lse[1, :, 2] = 300.0, -500.0
    lse[0, :, 3], lse[1, :, 3] = -3e4, 2.0
    lse[:, :, 4] = -1e4
    shares = lse.double().softmax(0).transpose(1, 2)[..., None]
    expected = shares[0] * first.double() + shares[1] * second.double()
    out = torch.empty(7, num_heads, head_dim, device=device)
    merge_attention(*(part.to(device) for part in (first, second, lse[0], lse[1])), out)
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 4), 128), ((32, 8), 128)])
@pytest.mark.parametrize(("num_earlier", "length", "padded"), [(64, 33, 48), (16, 16, 16), (128, 1, 64)])
def test_a_chunk_behind_earlier_tokens_equals_attention_by_definition(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, num_earlier: int, length: int,
    padded: int,
) -> None:  # fmt: skip
    check(device, dtype, heads, head_dim, (num_earlier, length, padded))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too long for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_earlier", [2048, 6144, 14336])
@pytest.mark.parametrize("length", [2048, 1500])
def test_long_chunks_behind_earlier_tokens(
    device: torch.device, dtype: torch.dtype, num_earlier: int, length: int
) -> None:
    check(device, dtype, (32, 8), 128, (num_earlier, length, 2048))


def check(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, sizes: tuple[int, int, int]
) -> None:
    """sizes: tokens in front, of the chunk, and with its padding. Those in front are another sequence's, too."""
    num_heads, num_kv_heads = heads
    num_earlier, length, padded = sizes
    lengths = [num_earlier, num_earlier + length]
    case = paged_case(lengths, num_kv_heads, head_dim, dtype, device, written=[num_earlier, 0])
    num_shared = num_earlier // BLOCK_SIZE
    case.table[1, :num_shared] = case.table[0, :num_shared]
    for tensors in (case.keys, case.values):
        tensors[1][:num_earlier] = tensors[0]
    query = torch.randn(padded, num_heads, head_dim).to(dtype)
    key, value = torch.zeros(2, padded, num_kv_heads, head_dim, dtype=dtype)
    key[:length], value[:length] = case.keys[1][num_earlier:], case.values[1][num_earlier:]
    positions = torch.full((padded,), -1, dtype=torch.int32)
    positions[:length] = torch.arange(num_earlier, num_earlier + length)
    slots = torch.ones(padded, dtype=torch.int32, device=device)
    key, value, on_device = key.to(device), value.to(device), query.to(device)
    write_kv(key, value, case.kv, case.table, slots, positions.to(device))
    chunk = torch.tensor([0, length, num_earlier], dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    out = torch.full((padded, num_heads, head_dim), torch.nan, dtype=dtype, device=device)
    attend_behind(on_device, key, value, case.kv, case.table, slots, chunk, num_earlier, scale, out)
    expected = attention(query[:length], case.keys[1], case.values[1], num_earlier, scale)
    assert relative_error(out[:length], expected) < TOLERANCE[dtype]
    assert out.isfinite().all(), "padding, too"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_library_says_how_much_its_scores_weigh(device: torch.device, is_causal: bool) -> None:
    query = torch.randn(256, 32, 128, device=device).half()
    key, value = torch.randn(2, 256 if is_causal else 640, 8, 128, device=device).half()
    out, lse = library_attention_of(query, key, value, 0.1, is_causal=is_causal)
    expected, expected_lse = by_definition(query.cpu(), key.cpu(), value.cpu(), 0.1, is_causal=is_causal)
    assert relative_error(out, expected.double()) < TOLERANCE[torch.float16]
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=1e-3, rtol=1e-3)
