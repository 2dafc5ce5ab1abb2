"""KV in 8 bits on the card's kernels: what is stored, what attention reads of it, and a runner over such a pool.

In Triton's interpreter a number that is none becomes one when it is converted: that is left to a card.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.runner import CudaRunner
from replicas.kernels.kv_write import write_kv
from replicas.kernels.paged_decode import paged_decode
from replicas.kernels.paged_prefill import paged_prefill
from replicas.kernels.rotation import rotate_into_pool
from replicas.kernels.work_sharing import WorkSharing
from replicas.kv.kv_pool import KvPool
from replicas.model import model_loader
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.rounding_cache import KvRounding
from replicas.model.self_check import self_check
from replicas.settings import ModelSettings
from replicas.stored_numbers import FP8, as_bits, as_stored
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.gpu import test_cuda_runner as cuda_rig
from tests.gpu.paged_case import TOLERANCE, PagedCase, attention, paged_case, relative_error

pytestmark = pytest.mark.interpreted

card = cuda_rig.card
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
ON_CARD = torch.cuda.is_available()
SCALES = ((0.25, 0.5), (0.03, 0.7))


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All of 16 bits; of float32 those, what lies in the middle of two of e4m3, and its neighbours."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if dtype is not torch.float32:
        return numbers.view(dtype)
    codes = torch.arange(127, dtype=torch.uint8)
    stored = codes.view(FP8).float()
    middles = (stored[:-1] + stored[1:]) / 2
    near = torch.cat([middles, *(middles.nextafter(torch.tensor(end)) for end in (0.0, 1e9))])
    return torch.cat([near, -near, numbers.view(torch.float16).float()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 5.0)])
def test_every_number_is_stored_as_on_a_cpu(
    device: torch.device, dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    """As k and v of tokens that are not rotated; what is handed on is the same numbers."""
    numbers = every_number(dtype).nan_to_num(3.0, torch.inf, -torch.inf)
    numbers = numbers[numbers.isfinite()]  # times a sine of zero an infinite one is none
    numbers[numbers == 0] = 0.0  # a sum with zero has its own sign
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 2048)])
    heads = numbers.view(-1, 32, 64)
    num_tokens = len(heads)
    projected = torch.cat([torch.ones_like(heads), heads, heads], 1).flatten(1).to(device)
    cos, sin = torch.ones(num_tokens, 64, dtype=dtype, device=device), torch.zeros(num_tokens, 64, dtype=dtype)
    kv = torch.zeros(-(-num_tokens // 16), 2, 16, 32, 64, device=device).to(FP8)
    table = torch.arange(len(kv), device=device)[None]
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    _, key, value = rotate_into_pool(
        projected, None, cos, sin.to(device), kv, table, torch.zeros_like(positions), positions, 0,
        copies_value=False, scales=scales,
    )  # fmt: skip
    for kind, handed in enumerate((key, value)):
        stored = kv[:, kind].reshape(-1, 32, 64)[:num_tokens]
        expected = as_stored(heads, FP8, scales[kind])
        assert torch.equal(as_bits(stored.cpu()), as_bits(expected))
        assert torch.equal(handed.cpu(), expected.to(dtype))


@pytest.mark.skipif(not ON_CARD, reason="the interpreter converts it to a number")
def test_what_is_no_number_stays_none(device: torch.device) -> None:
    projected = torch.full((1, 192), torch.nan, device=device)
    kv, cos = torch.zeros(1, 2, 16, 1, 64, device=device).to(FP8), torch.ones(1, 64, device=device)
    place = torch.zeros(1, dtype=torch.int32, device=device)
    rotate_into_pool(projected, None, cos, cos, kv, place.long()[None], place, place, 0, copies_value=False)
    assert kv[0, :, 0].float().isnan().all()


def stored_case(
    lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, written: list[int]
) -> PagedCase:
    """Keys and values as attention sees them."""
    case = paged_case(lengths, heads, head_dim, torch.float32, device, written)
    keys, values = ([as_stored(t, FP8).to(dtype) for t in tensors] for tensors in (case.keys, case.values))
    return replace(case, kv=as_stored(case.kv, FP8), keys=keys, values=values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 128), ((9, 3), 64), ((6, 2), 96)])
def test_decode_is_attention_over_what_is_stored(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    num_heads, num_kv_heads = heads
    lengths = [1, 15, 16, 64, 65, 0, 129, 300]
    case = stored_case(lengths, num_kv_heads, head_dim, dtype, device, [max(n - 1, 0) for n in lengths])
    query = torch.randn(len(lengths), num_heads, head_dim).to(dtype)
    new_key, new_value = (
        torch.stack([t[-1] if len(t) else torch.zeros(num_kv_heads, head_dim, dtype=dtype) for t in tokens])
        for tokens in (case.keys, case.values)
    )
    out = torch.full((len(lengths), num_heads, head_dim), torch.nan, dtype=dtype, device=device)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=device)
    before, scale = as_bits(case.kv).clone(), head_dim**-0.5
    sharing = replace(WorkSharing.of(num_kv_heads, head_dim, dtype, 132, len(lengths)), num_resident=5)
    paged_decode(
        query.to(device), new_key.to(device), new_value.to(device), case.kv, case.table, slots, positions,
        sharing.share_out(positions), sharing.most_pieces(len(lengths)), sharing.tile_len(len(lengths)), scale, out,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        if length:
            expected = attention(query[row : row + 1], case.keys[row], case.values[row], length - 1, scale)
            assert relative_error(out[row : row + 1], expected) < TOLERANCE[dtype], length
    changed = as_bits(case.kv) != before
    assert int(changed.any(-1).any(-1).sum()) == 2 * sum(n > 0 for n in lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_is_attention_over_what_is_stored(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    spans = [(0, 1), (0, 33), (16, 70), (63, 2)]
    case = stored_case([start + n for start, n in spans], 2, head_dim, dtype, device, [start for start, _ in spans])
    num_tokens = sum(length for _, length in spans)
    query = torch.randn(num_tokens, 6, head_dim).to(dtype)
    key, value = (
        torch.cat([tokens[row][start:] for row, (start, _) in enumerate(spans)]).to(device)
        for tokens in (case.keys, case.values)
    )
    rows = [(row, start + i) for row, (start, length) in enumerate(spans) for i in range(length)]
    slots, positions = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
    write_kv(key, value, case.kv, case.table, slots, positions)
    firsts = [sum(n for _, n in spans[:row]) for row in range(len(spans))]
    chunks = [(first, length, start) for first, (start, length) in zip(firsts, spans, strict=True)]
    out = torch.full((num_tokens, 6, head_dim), torch.nan, dtype=dtype, device=device)
    on_device = torch.tensor(chunks, dtype=torch.int32, device=device)
    longest, scale = max(length for _, length in spans), head_dim**-0.5
    paged_prefill(query.to(device), case.kv, case.table, slots, on_device, len(chunks), longest, scale, out)
    for row, (first, length, position) in enumerate(chunks):
        span = slice(first, first + length)
        expected = attention(query[span], case.keys[row], case.values[row], position, scale)
        assert relative_error(out[span], expected) < TOLERANCE[dtype], (position, length)


# -- a runner --------------------------------------------------------------------------------------------


def load(folder: Path, device: torch.device, model: str, scales: tuple[tuple[float, float], ...] = ()) -> LoadedModel:
    """Its reference is rounded as the pool will be."""
    cuda_rig.load(folder, device, model)
    settings = ModelSettings(str(folder), str(folder), "float16", 256, "dummy", False)
    with pytest.MonkeyPatch.context() as patch:  # made-up weights have no scales
        patch.setattr(model_loader, "KvRounding", lambda none: KvRounding(scales))
        loaded = load_model(settings, device, "fp8")
    for module in loaded.model.modules():
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight.data = module.weight.data.contiguous()
    return loaded


def runner_of(loaded: LoadedModel, device: torch.device, scales: tuple[tuple[float, float], ...] = ()) -> CudaRunner:
    layout = replace(loaded.kv_layout(16, "fp8"), scales=scales)
    return CudaRunner(loaded, KvPool(layout, 128, device), len(cuda_rig.LENGTHS), 256)


@torch.inference_mode()
@pytest.mark.parametrize("scales", [(), SCALES], ids=["no scales", "scales"])
@pytest.mark.parametrize("model", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM"])
def test_the_self_check_holds_by_hand_and_by_graphs(
    device: torch.device, tmp_path: Path, model: str, scales: tuple[tuple[float, float], ...]
) -> None:
    """With the kernel between projections and attention, and without it."""
    loaded = load(tmp_path, device, model, scales)
    runner = runner_of(loaded, device, scales)
    scale = max(float(prompt.logits.abs().max()) for prompt in loaded.reference)
    assert 0 < self_check(runner, loaded) < 0.1 * scale
    if ON_CARD:  # graphs take minutes in the interpreter, and launch the same kernels
        assert runner.warm_up()
        assert 0 < self_check(runner, loaded) < 0.1 * scale


@torch.inference_mode()
@pytest.mark.parametrize("model", ["LlamaForCausalLM", "Olmo2ForCausalLM"])
def test_a_prompt_in_one_chunk_leaves_what_many_chunks_and_rows_do(
    device: torch.device, tmp_path: Path, model: str
) -> None:
    """By the library's attention of fresh prompts, by chunks over the pool, and token by token. Each sums in its own
    order, so that a model of float16 gives other last bits, on a card as well: the same bytes but for few, where that
    moves a number over the middle between two of e4m3. One near zero, of larger ones that cancel out, moves by what is
    the last bit of those: by several of e4m3's least steps, or to the other sign."""
    loaded = load(tmp_path, device, model)
    prompt = tuple((7 * i) % 290 for i in range(64))
    init, tables = SlotInit(0, 0, SamplingParams(temperature=0.0), None), (TableWrite(0, 0, (4, 9, 7, 2)),)
    pools, logits = [], []
    for ends in ((0, 64), (0, 20, 37, 64), (0, 10, *range(11, 65))):
        runner = runner_of(loaded, device, SCALES)
        runner._slots.apply(StepPlan(0, (init,), tables, (), ()))
        for start, end in pairwise(ends):
            runner._slots.last_token[0] = prompt[start]
            part = Slice.of_prompt("p", 0, start, prompt[start:end], (SampleTarget(0, 0),))
            given = runner._forward(StepPlan(1, (), (), (), (Slice("p", 0, 0, start) if end == start + 1 else part,)))
        pools.append(runner.pool.tensor[[4, 9, 7, 2]].cpu())
        logits.append(given.cpu())
    assert int((pools[0].float() != 0).sum()) > pools[0].numel() // 2
    for pool, given in zip(pools[1:], logits[1:], strict=True):
        numbers, expected = pool.float(), pools[0].float()
        moved = (numbers - expected).abs()
        last_bit = 2.0**-10 * expected.abs().amax((0, 3, 4, 5), keepdim=True)  # of each layer's keys and values
        assert bool((moved <= torch.maximum(expected.abs() / 8, last_bit)).all())
        assert float((moved != 0).float().mean()) < 0.02
        torch.testing.assert_close(given, logits[0], atol=0.02 * float(logits[0].abs().max()), rtol=0.02)
