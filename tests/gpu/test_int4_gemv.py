"""The product of one row with weights of 4 bits against the definition: sizes that no tile divides, groups, bias."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import int4_card_linear
from replicas.kernels import int4_gemv as module
from replicas.kernels.int4_gemv import Int4GemvTile, int4_gemv, multiplies_right
from replicas.kernels.int4_words import group_factors, words_of
from replicas.layers.packed_weights import PackedWeights, dequantised, pack_int4
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from tests.gpu.paged_case import TOLERANCE, relative_error
from tests.gpu.test_quantised_products import int4_case

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float16, torch.bfloat16]
SCHEME = Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.AWQ, 128, is_symmetric=False)
TILES = [Int4GemvTile(2, 4, 1), Int4GemvTile(4, 2, 2), Int4GemvTile(8, 2, 1), Int4GemvTile(2, 1, 8)]


@pytest.mark.parametrize("tile", [None, *TILES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_out", "num_in", "group_size", "has_bias"),
    [(64, 1536, 128, False), (64, 512, 64, True), (100, 160, 32, True), (33, 768, 256, True), (7, 192, 96, False)],
)
def test_the_product_is_that_of_the_matrix_unpacked(
    device: torch.device, num_out: int, num_in: int, group_size: int, has_bias: bool, dtype: torch.dtype,
    tile: Int4GemvTile | None,
) -> None:  # fmt: skip
    """Whole tiles and others, one step and more."""
    case = int4_case(1, num_out, num_in, group_size, dtype, has_bias)
    out = int4_gemv(case.x.to(device), *case.weights_on(device), group_size, case.bias_on(device), tile)
    assert out.shape == (1, num_out)
    assert out.dtype is dtype
    assert relative_error(out, case.expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_each_weight_meets_its_input(device: torch.device, group_size: int, tile: Int4GemvTile) -> None:
    """One that is not zero at a time, inputs that are all unlike, scales that neighbours do not have: exact."""
    dtype, num_in = torch.float16, 256
    x = torch.arange(1, num_in + 1).to(dtype)[None, :]
    values = torch.full((num_in, num_in), 8, dtype=torch.uint8) + torch.eye(num_in, dtype=torch.uint8)
    outputs, groups = torch.arange(num_in)[:, None], torch.arange(num_in // group_size)
    scales, zeros = torch.exp2((outputs + groups) % 3).half(), torch.full((num_in, len(groups)), 8, dtype=torch.uint8)
    out = int4_gemv(
        x.to(device), words_of(values).to(device), group_factors(scales, zeros).to(device), group_size, None, tile
    )
    assert torch.equal(out.cpu(), x * scales[outputs[:, 0], outputs[:, 0] // group_size])


# The interpreter does not round to bfloat16.
@pytest.mark.parametrize("dtype", DTYPES if torch.cuda.is_available() else DTYPES[:1])
@pytest.mark.parametrize("tile", [TILES[0], TILES[2]])
def test_weights_are_rounded_once(device: torch.device, tile: Int4GemvTile, dtype: torch.dtype) -> None:
    """To the row's type, of which a product of 7 and a scale has too many digits: sums are not rounded before."""
    values, zeros = torch.full((16, 256), 15, dtype=torch.uint8), torch.full((16, 2), 8, dtype=torch.uint8)
    scales = (1 + torch.arange(32).reshape(16, 2) / 128).half()
    x = torch.zeros(1, 256, dtype=dtype)
    x[0, 3], x[0, 131] = 1.0, -1.0
    packed, factors = words_of(values).to(device), group_factors(scales, zeros).to(device)
    out = int4_gemv(x.to(device), packed, factors, 128, None, tile)
    rounded = (7 * scales.float()).to(dtype).float()
    assert torch.equal(out.cpu()[0], (rounded[:, 0] - rounded[:, 1]).to(dtype))


def test_the_assembly_multiplies_as_words_are_read() -> None:
    """Carried out for a warp as PTX defines it (m16n8k16), which the interpreter does not: thread 4 g + t has words
    8 t to 8 t + 7 of outputs g of both blocks. Small whole numbers, so that no order of a sum matters."""
    generator = torch.Generator().manual_seed(6)
    blocks = torch.randint(-9, 10, (2, 8, 32), generator=generator)
    inputs = torch.randint(-9, 10, (32,), generator=generator)
    before = torch.randint(-9, 10, (2, 8), generator=generator)
    pairs = {16 + place: blocks[0].view(8, 4, 4, 2)[:, :, place] for place in range(4)}  # [g, t, of a pair]
    pairs |= {20 + place: blocks[1].view(8, 4, 4, 2)[:, :, place] for place in range(4)}
    pairs |= {24 + place: inputs.view(4, 4, 2)[:, place].expand(8, 4, 2) for place in range(4)}
    sums = {number: before[block][:, None].expand(8, 4) for number, block in ((28, 0), (29, 0), (36, 1), (37, 1))}
    for line in module._assembly("bf16").splitlines():
        if line.startswith("mma"):
            to, rows, columns, added = (
                [int(n) for n in re.findall(r"\d+", part)] for part in re.findall("{(.*?)}", line)
            )
            upper, lower = (torch.cat((pairs[rows[i]], pairs[rows[i + 2]]), 2).flatten(1) for i in (0, 1))  # [g, k]
            vectors = torch.cat((pairs[columns[0]], pairs[columns[1]]), 2).flatten(1)  # of each column g
            products = torch.cat((upper, lower)) @ vectors.T
            found = products.view(2, 8, 4, 2)  # c0 and c1 are columns 2 t and 2 t + 1 of row g, c2 and c3 of row g + 8
            sums |= {to[i]: sums[added[i]] + found[i // 2, :, :, i % 2] for i in range(4)}
    wanted = before + blocks @ inputs
    for number, block in ((0, 0), (1, 0), (8, 1), (9, 1)):
        assert torch.equal(sums[number], wanted[block][:, None].expand(8, 4))


def test_it_is_asked_whether_it_multiplies_right(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where threads have other words it does not."""
    multiplies_right.cache_clear()
    assert multiplies_right(device)
    right = module.int4_gemv
    for wrong in (lambda out: out.flip(1), lambda out: out + (out == out.max())):
        for of_gates in (False, True):  # one of both ways
            multiplies_right.cache_clear()

            def asked(*given: Any, is_gated: bool = False, wrong: Any = wrong, of_gates: bool = of_gates) -> Any:
                out = right(*given, is_gated=is_gated)
                return wrong(out) if is_gated == of_gates else out

            monkeypatch.setattr(module, "int4_gemv", asked)
            assert not multiplies_right(device)
    multiplies_right.cache_clear()


def test_it_is_asked_when_a_layer_is_made_and_not_in_a_step(device: torch.device) -> None:
    """A step may be on its way into a graph, in which nothing can be read back."""
    multiplies_right.cache_clear()
    case = int4_case(1, 64, 256, 128, torch.float16, has_bias=False)
    weights = PackedWeights(pack_int4(case.values).to(device), case.scales.to(device), 128, case.zeros.to(device))
    layer = int4_card_linear.Int4CardLinear(weights, None, SCHEME)
    assert multiplies_right.cache_info().misses == 1
    layer(case.x.to(device))
    found = multiplies_right.cache_info()
    assert (found.misses, found.hits) == (1, 1)


def test_where_there_is_no_such_instruction_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplies_right.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(module, "int4_gemv", lambda *given: pytest.fail("tried"))
    assert not multiplies_right(torch.device("cuda", 0))
    multiplies_right.cache_clear()


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_layer_uses_it_for_one_row_where_it_is_right(
    device: torch.device, num_rows: int, is_right: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    used: list[int] = []

    def counted(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        used.append(len(x))
        return int4_gemv(x, *given, **named)

    monkeypatch.setattr(int4_card_linear, "int4_gemv", counted)
    monkeypatch.setattr(int4_card_linear, "multiplies_right", lambda device: is_right)
    torch.manual_seed(7)
    values = torch.randint(0, 16, (64, 256), dtype=torch.uint8).to(device)
    scales, zeros = torch.rand(64, 2).add(0.5).half().to(device), torch.randint(0, 16, (64, 2), dtype=torch.uint8)
    weights = PackedWeights(pack_int4(values), scales, 128, zeros.to(device))
    layer = int4_card_linear.Int4CardLinear(weights, None, SCHEME)
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert events == ([] if is_right else ["int4_gemv_refused"])
    x = torch.randn(num_rows, 256).half()
    expected = x.double() @ dequantised(weights, x.dtype).double().cpu().T
    assert relative_error(layer(x.to(device)), expected) < TOLERANCE[torch.float16]
    assert used == ([1] if is_right and num_rows == 1 else [])
