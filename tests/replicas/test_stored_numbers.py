"""KV in 8 bits: every number as the format's definition says, and pools, digests and chunks of such numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.kv.host_pool import HostPool
from replicas.kv.kv_digest import BlockDigester
from replicas.kv.kv_pool import KvLayout, KvPool
from replicas.model.checkpoint_mismatch import CheckpointMismatch
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel
from replicas.settings import ModelSettings
from replicas.stored_numbers import FP8, Fp8Reader, as_bits, as_stored
from scheduler.plan import BlockSwap, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.rounded_kv import NUMBERS, rounded
from tests.engines.tiny_model import save_tiny_model
from tests.model_folder import CACHE_DIR, model_folder

CPU = torch.device("cpu")
LAYOUT = KvLayout(3, 8, 2, 16, FP8)
# Softmax and matrix products of another shape add in another order: what holds of one chunk and of many, see below.
CUTS = ((0, 90), (0, 8, 13, 64, 90), (0, 40, *range(41, 91)))


def test_the_format_is_as_defined() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    assert codes.tolist() == NUMBERS
    assert NUMBERS[-1] == 448.0


def test_numbers_are_rounded_to_the_nearest_and_never_become_none() -> None:
    table = torch.tensor(NUMBERS)
    middles = (table[1:] + table[:-1]) / 2
    near = [middles.nextafter(torch.tensor(end)) for end in (0.0, 1e9)]
    numbers = torch.cat([table, middles, *near, torch.tensor([448.1, 464.0, 465.0, 500.0, 3e38])])
    numbers = torch.cat([numbers, -numbers, 100 * torch.randn(5000), 0.01 * torch.randn(5000)])
    assert torch.equal(as_stored(numbers, FP8).float(), rounded(numbers))
    assert as_stored(torch.tensor([torch.inf, -torch.inf]), FP8).float().tolist() == [448.0, -448.0]
    assert as_stored(torch.tensor([torch.nan]), FP8).float().isnan().all(), "a fault is not hidden"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    assert torch.equal(as_stored(numbers, FP8).float(), rounded(numbers.float()))


@pytest.mark.parametrize("scale", [0.37, 5.0, 2.0**-9])
def test_scaled_numbers_are_divided_before_they_are_rounded(scale: float) -> None:
    numbers = torch.randn(10_000) * 300 * scale
    stored = as_stored(numbers, FP8, scale)
    assert torch.equal(stored.float(), rounded(numbers * (1 / scale)))
    largest = numbers.abs() > 448 * scale
    assert 0 < int(largest.sum()) < 5000
    assert torch.equal(stored.float()[largest].abs(), torch.full((int(largest.sum()),), 448.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_read_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(2).roll(1)
    out = torch.empty(512, dtype=dtype)
    Fp8Reader(dtype).read(codes.view(FP8), out)
    expected = codes.view(FP8).to(dtype)
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(out.isnan(), expected.isnan())


# -- pools -----------------------------------------------------------------------------------------------


def test_a_layout_says_its_numbers_and_scales() -> None:
    assert LAYOUT.describe() == "3x2x8x2x16:float8_e4m3fn"
    assert LAYOUT.bytes_per_token == 3 * 2 * 2 * 16
    ones, others = (((1.0, 1.0),) * 3, ((1.0, 1.0), (0.5, 1.0), (1.0, 1.0)))
    assert replace(LAYOUT, scales=ones).describe() == LAYOUT.describe()
    texts = [replace(LAYOUT, scales=scales).describe() for scales in (others, others[::-1], (others[1], *others[:2]))]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("3x2x8x2x16:float8_e4m3fn*")


@pytest.mark.parametrize("scales", [((1.0, 1.0),), ((1.0, 0.0),) * 3, ((1.0, -1.0),) * 3, ((1.0, float("nan")),) * 3])
def test_wrong_scales_are_refused(scales: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="scale"):
        replace(LAYOUT, scales=scales)
    with pytest.raises(ValueError, match=r"scales of 3 layers for 3 of torch\.float32"):
        replace(LAYOUT, dtype=torch.float32, scales=((1.0, 1.0),) * 3)


def test_blocks_are_swapped_copied_cleared_and_digested() -> None:
    pool = KvPool(LAYOUT, 6, CPU)
    as_bits(pool.tensor).random_(0, 256, generator=torch.Generator().manual_seed(1))
    before = as_bits(pool.tensor).clone()
    digester = BlockDigester.for_pool(pool.tensor)
    assert digester.words_per_block * 4 == LAYOUT.block_bytes
    digest = digester.digest_blocks(pool.tensor, [2])
    host = HostPool(pool, 2)
    assert host.tensor[0].nbytes == LAYOUT.block_bytes
    host.move(StepPlan(0, (), (), (), (), swap_outs=(BlockSwap(2, 1),)))
    host.move(StepPlan(1, (), (), (), (), swap_ins=(BlockSwap(4, 1),)))
    pool.copy_block(4, 5)
    assert torch.equal(as_bits(pool.tensor)[5], before[2])
    assert digester.digest_blocks(pool.tensor, [5]) == digest
    as_bits(pool.tensor)[5, 2, 1, 7, 1, 15] ^= 1
    assert digester.digest_blocks(pool.tensor, [5]) != digest
    pool.clear(torch.tensor([3]), [(4, 5)])
    assert not as_bits(pool.tensor)[3].any()
    assert not as_bits(pool.tensor)[4, :, :, 5:].any()
    assert torch.equal(as_bits(pool.tensor)[4, :, :, :5], before[2, :, :, :5])


def test_a_block_is_whole_words_in_every_size() -> None:
    for block_size in (8, 16, 32, 64, 128):
        assert KvLayout(1, block_size, 1, 1, FP8).block_bytes % 4 == 0


# -- a prompt in one chunk, in many, token by token ------------------------------------------------------


def filled_pool(
    loaded: LoadedModel, prompt: list[int], cuts: tuple[int, ...], scales: tuple[tuple[float, float], ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of a prompt, and the logits behind it. A token by itself is a row, as of a running request."""
    layout = replace(loaded.kv_layout(16, "fp8"), scales=scales)
    runner = ModelRunner(loaded, KvPool(layout, 8, CPU), num_slots=1, max_model_len=128)
    init = SlotInit(0, 0, SamplingParams(temperature=0.0), None)
    runner.launch(StepPlan(0, (init,), (TableWrite(0, 0, (3, 1, 5, 7, 0, 2)),), (), ()))
    for start, end in pairwise(cuts):
        part = Slice.of_prompt("r", 0, start, tuple(prompt[start:end]), (SampleTarget(0, 0),))
        inits: tuple[SlotInit, ...] = ()
        if end == start + 1:
            part, inits = Slice("r", 0, 0, start), (replace(init, last_token=prompt[start]),)
        logits = runner.logits(StepPlan(1, inits, (), (), (part,)))
    return runner.pool.tensor[[3, 1, 5, 7, 0, 2]], logits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny fp8")
    save_tiny_model(folder)
    torch.set_num_threads(1)
    return load_model(ModelSettings(str(folder), "", "float32", 128, "auto", False), CPU, "fp8")


@pytest.mark.parametrize("scales", [(), ((0.03, 0.7), (1.5, 0.2))], ids=["no scales", "scales"])
def test_one_chunk_leaves_the_bytes_of_many(tiny: LoadedModel, scales: tuple[tuple[float, float], ...]) -> None:
    """Float32 has its sums in another order, and rounding hides it: but where that moves a number over a middle, which
    is a step then, one number in some hundred thousands. Most machines have none here."""
    prompt = [(7 * i + i * i) % 500 for i in range(90)]
    first, *others = [filled_pool(tiny, prompt, cuts, scales) for cuts in CUTS]
    assert len(first[0].float().unique()) > 100
    for pool, logits in others:
        moved = (as_bits(pool).int() - as_bits(first[0]).int()).abs()
        assert int(moved.max()) <= 1
        assert int((moved != 0).sum()) <= 3
        torch.testing.assert_close(logits, first[1], atol=1e-2, rtol=1e-2)


def test_without_rounding_before_attention_the_logits_would_be_others(tiny: LoadedModel) -> None:
    """What a query sees of its own chunk is rounded: by the logits of a prompt in one chunk."""
    prompt = [(7 * i + i * i) % 500 for i in range(90)]
    _, logits = filled_pool(tiny, prompt, (0, 90))
    runner = ModelRunner(tiny, KvPool(tiny.kv_layout(16), 8, CPU), num_slots=1, max_model_len=128)
    init = SlotInit(0, 0, SamplingParams(temperature=0.0), None)
    chunk = Slice.of_prompt("r", 0, 0, tuple(prompt), (SampleTarget(0, 0),))
    exact = runner.logits(StepPlan(0, (init,), (TableWrite(0, 0, tuple(range(6))),), (), (chunk,)))
    assert float((exact - logits).abs().max()) > 0.02 * float(exact.abs().max())


def test_smollm2_in_one_chunk_and_in_many() -> None:
    """Thirty layers: a number that is moved moves others behind it, each by a step or two; the text stays."""
    torch.set_num_threads(1)
    loaded = load_model(ModelSettings(model_folder(), str(CACHE_DIR), "float32", 128, "auto", False), CPU, "fp8")
    prompt = [(7919 * (i + 1)) % 40_000 for i in range(90)]
    first, second = (filled_pool(loaded, prompt, cuts) for cuts in CUTS[:2])
    numbers, others = first[0].float(), second[0].float()
    moved = as_bits(first[0]) != as_bits(second[0])
    assert float(moved.float().mean()) < 0.05
    assert float((numbers - others).norm() / numbers.norm()) < 0.02
    assert int(first[1].argmax()) == int(second[1].argmax())
    scale = float(first[1].abs().max())
    assert float((first[1] - second[1]).abs().max()) < 0.02 * scale


# -- the check before serving, and scales in files -------------------------------------------------------


def load(folder: Path) -> LoadedModel:
    return load_model(ModelSettings(str(folder), "", "float32", 128, "auto", False), CPU, "fp8")


def test_the_self_check_is_as_strict_as_rounding_allows(tiny: LoadedModel) -> None:
    """A reference that was not rounded is beyond it."""
    runner = ModelRunner(tiny, KvPool(tiny.kv_layout(16, "fp8"), 32, CPU), 4, 128)
    scale = max(float(prompt.logits.abs().max()) for prompt in tiny.reference)
    assert self_check(runner, tiny) < 0.01 * scale
    exact = ModelRunner(tiny, KvPool(tiny.kv_layout(16), 32, CPU), 4, 128)
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        self_check(exact, tiny)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("k_scale", "v_scale"), ((0.5, 2.0), (0.5, 2.0))),
        (("attn.k_scale", "attn.v_scale"), ((0.5, 2.0), (0.5, 2.0))),
        (("k_proj.k_scale", "v_proj.v_scale"), ((0.5, 2.0), (0.5, 2.0))),
        (("k_proj.output_scale", "v_proj.output_scale"), ((0.5, 2.0), (0.5, 2.0))),
        (("v_scale",), ((1.0, 0.5), (1.0, 0.5))),
        (("kv_scale",), ((0.5, 0.5), (0.5, 0.5))),
    ],
)
def test_scales_are_found_by_every_name(
    tmp_path: Path, names: tuple[str, ...], expected: tuple[tuple[float, float], ...], caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path)
    add_scales(tmp_path, {name: torch.tensor([scale]) for name, scale in zip(names, (0.5, 2.0), strict=False)})
    loaded = load(tmp_path)
    assert loaded.kv_layout(8, "fp8").scales == expected
    lacking = [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "kv_scales_lacking"]
    assert bool(lacking) == (names == ("v_scale",))
    if lacking:
        assert "layer 0's keys, layer 1's keys" in lacking[0]


@pytest.mark.parametrize(
    ("name", "scale", "refusal"),
    [
        ("k_scale", torch.ones(2), "layers.0.self_attn.k_scale has 2 numbers"),
        ("v_scale", torch.tensor(0.0), "v_scale = 0 is no scale"),
        ("v_scale", torch.tensor(torch.nan), "v_scale = nan is no scale"),
        ("q_scale", torch.tensor(1.0), "the model has no place for .*q_scale"),
    ],
)
def test_scales_that_are_none_are_refused(tmp_path: Path, name: str, scale: torch.Tensor, refusal: str) -> None:
    save_tiny_model(tmp_path)
    add_scales(tmp_path, {name: scale})
    with pytest.raises(CheckpointMismatch, match=refusal):
        load(tmp_path)


def test_two_names_of_one_scale_must_agree(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    add_scales(tmp_path, {"k_scale": torch.tensor(0.5), "k_proj.output_scale": torch.tensor(0.5)})
    assert load(tmp_path).kv_scales == ((0.5, 1.0), (0.5, 1.0))
    add_scales(tmp_path, {"k_proj.output_scale": torch.tensor(0.25)})
    with pytest.raises(CheckpointMismatch, match="layer 0's keys have two unlike scales"):
        load(tmp_path)


def add_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    """To both layers."""
    weights = load_file(folder / "model.safetensors")
    added = {
        f"model.layers.{layer}.self_attn.{name}": scale.clone() for name, scale in scales.items() for layer in (0, 1)
    }
    save_file({**weights, **added}, folder / "model.safetensors", {"format": "pt"})
