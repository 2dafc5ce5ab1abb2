"""A row of a quantised product is what it is alone: beside any number of others, wherever it stands among them.

So a greedy text does not depend on its neighbours. What is rounded is so to the last bit; sums of float32 have another
order in another shape, those of integers have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.layers.packed_weights import FP8, PackedWeights, dequantised
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.rounding import rotation, round_rows, round_weights, round_weights_int4
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from replicas.settings import ModelSettings
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.replicas.quantised_checkpoints import save_quantised, tiny_llama
from tests.replicas.quantised_dialects import CASES

CPU = torch.device("cpu")
MOST = 300
NUM_OUT, NUM_IN = 40, 192
GREEDY = SamplingParams(temperature=0.0)


def _layer(name: str) -> QuantisedLinear:
    torch.manual_seed(3)
    weight = torch.randn(NUM_OUT, NUM_IN)
    channel, token = Granularity.CHANNEL, Activations.TOKEN
    int8 = Scheme(WeightKind.INT8, channel, token, Dialect.MADE_HERE)
    fp8 = Scheme(WeightKind.FP8, channel, token, Dialect.MADE_HERE)
    int4 = Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.MADE_HERE, 64)
    values, scales = round_rows(weight, FP8, 128)  # a group and a half
    blocks = replace(fp8, granularity=Granularity.BLOCK, activations=Activations.TOKEN_GROUP, group_size=128)
    static = torch.tensor([0.03])
    weights, scheme = {
        "int8": (round_weights(weight, torch.int8), int8),
        "int8 rotated": (round_weights(weight, torch.int8, rotation(64, torch.float32, CPU)), int8),
        "int8 static": (
            replace(round_weights(weight, torch.int8), input_scale=static),
            replace(int8, activations=Activations.STATIC),
        ),
        "fp8": (round_weights(weight, FP8), fp8),
        "fp8 static": (
            replace(round_weights(weight, FP8), input_scale=static),
            replace(fp8, activations=Activations.STATIC),
        ),
        "fp8 blocks": (PackedWeights(values.contiguous(), scales, 128), blocks),
        "fp8 weights alone": (round_weights(weight, FP8), replace(fp8, activations=Activations.NONE)),
        "int4": (round_weights_int4(weight, 64), int4),
        "int4 in an order": (replace(round_weights_int4(weight, 64), order=torch.randperm(NUM_IN)), int4),
    }[name]
    return QuantisedLinear(weights, torch.nn.Parameter(torch.randn(NUM_OUT), requires_grad=False), scheme)


def _rows() -> torch.Tensor:
    """Of all sizes; some have outliers, one is nothing but zeros."""
    torch.manual_seed(4)
    rows = torch.randn(MOST, NUM_IN) * torch.logspace(-3, 3, MOST)[torch.randperm(MOST)].unsqueeze(1)
    rows[::7, 5] *= 100
    rows[9] = 0
    return rows


NAMES = ("int8", "int8 rotated", "int8 static", "fp8", "fp8 static", "fp8 blocks", "fp8 weights alone", "int4")


SOME = (*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, MOST - 1, MOST)


@pytest.mark.parametrize("name", [*NAMES, "int4 in an order"])
def test_a_row_beside_others(name: str) -> None:
    _check_rows(name, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "int4 in an order"])
def test_a_row_beside_any_number_of_others(name: str) -> None:
    _check_rows(name, range(1, MOST + 1))


def _check_rows(name: str, counts: Iterable[int]) -> None:
    layer, rows = _layer(name), _rows()
    all_of_them = layer(rows)
    is_rounded = layer.scheme.activations is not Activations.NONE
    values, scales = layer.round_inputs(layer.as_weights_have_them(rows)) if is_rounded else (rows, rows)
    # float32 sums of as many products, whatever their order: of the largest that they may come to.
    tolerance = 1e-6 * (rows.abs().sum(1, keepdim=True) * float(dequantised(layer.weights, torch.float32).abs().max()))
    tolerance = tolerance * (64 if layer.rotation is not None else 1) + 1e-6
    for count in counts:
        begin = (37 * count) % (MOST - count + 1)
        some = slice(begin, begin + count)
        if is_rounded:
            of_some, scales_of_some = layer.round_inputs(layer.as_weights_have_them(rows[some]))
            assert torch.equal(of_some.view(torch.uint8), values[some].view(torch.uint8)), count
            assert torch.equal(scales_of_some, scales if len(scales) == 1 else scales[some]), count
        product = layer(rows[some])
        if values.dtype is torch.int8:
            assert torch.equal(product, all_of_them[some]), count
        assert bool(((product - all_of_them[some]).abs() <= tolerance[some]).all()), count


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_16_bits(name: str) -> None:
    """Rounded once from sums of float32: a text may part by the last bit of such a number, no more."""
    layer, rows = _layer(name).to(torch.bfloat16) if name == "int4" else _layer(name), _rows().bfloat16()
    if layer.rotation is not None:
        layer.rotation = torch.nn.Parameter(layer.rotation.bfloat16(), requires_grad=False)
    if name in ("int4", "fp8 weights alone"):
        assert layer.bias is not None
        layer.bias = torch.nn.Parameter(layer.bias.bfloat16(), requires_grad=False)
    all_of_them = layer(rows)
    assert all_of_them.dtype is torch.bfloat16
    for count in (1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 255, 299):
        torch.testing.assert_close(layer(rows[:count]), all_of_them[:count], rtol=2**-7, atol=0.05)


# -- a row of a whole step -------------------------------------------------------------------------------

PROMPT = [5, 17, 3, 88, 41, 60, 9, 33]
BESIDE = ((1, 0), (2, 90), (15, 1), (16, 0), (63, 33), (64, 0), (130, 120), (MOST - 1, 128))  # rows, a chunk
SCHEMES = {"int8 at load": "int8", "fp8 at load": "fp8", "int4 at load": "int4", "fp8 blocks": "", "gptq": ""}


def _prompt_of(slot: int) -> list[int]:
    return PROMPT if slot == 0 else [3 + (11 * slot + 7 * i) % 90 for i in range(1 + slot % 8)]


def _step(runner: ModelRunner, num_others: int, chunk_len: int) -> torch.Tensor:
    """Logits of the row of slot 0 beside others and a chunk of another prompt, over a pool that is written anew."""
    slots = range(num_others + 1)
    inits = tuple(SlotInit(slot, 0, GREEDY, 7) for slot in (*slots, MOST))
    tables = (*(TableWrite(slot, 0, (slot,)) for slot in slots), TableWrite(MOST, 0, tuple(range(MOST, MOST + 8))))
    prompts = [Slice.of_prompt(f"{slot}", slot, 0, tuple(_prompt_of(slot)), ()) for slot in slots]
    runner.launch(StepPlan(0, inits, tables, (), tuple(prompts))).result()
    rows = [Slice(f"{slot}", 0, slot, len(_prompt_of(slot))) for slot in slots]
    rows = [*rows[1:], rows[0]]  # the last of them
    chunk = Slice.of_prompt("chunk", MOST, 0, tuple(3 + i % 90 for i in range(chunk_len)), (SampleTarget(MOST, 0),))
    logits = runner.logits(StepPlan(1, (), (), (), (*rows, *([chunk] if chunk_len else []))))
    return logits[num_others]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_of_a_step_beside_rows_and_a_chunk(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = tiny_llama(intermediate_size=128)
    if SCHEMES[name]:
        model.save_pretrained(tmp_path)
    else:
        save_quantised(tmp_path, model, CASES[name].said, CASES[name].pack)
    settings = ModelSettings(str(tmp_path), "", "float32", 128, "auto", False, SCHEMES[name] or "none")
    for kv_dtype in ("auto", "fp8"):
        loaded = load_model(settings, CPU, kv_dtype)
        runner = ModelRunner(loaded, KvPool(loaded.kv_layout(16, kv_dtype), MOST + 8, CPU), MOST + 1, 128)
        alone = _step(runner, 0, 0)
        best = alone.topk(2).values
        assert float(best[0] - best[1]) > 0.05, "no near tie"
        for num_others, chunk_len in BESIDE:
            among = _step(runner, num_others, chunk_len)
            torch.testing.assert_close(among, alone, atol=1e-2 * float(alone.abs().max()), rtol=0)
            assert int(among.argmax()) == int(alone.argmax())
