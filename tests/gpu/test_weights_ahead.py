"""Weights that a kernel in front of their product fetches: which bytes, and that nothing else is changed by it.

In the interpreter what fetches is replaced by what marks; on a card there is no cache to look into.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="a CPU torch comes without triton")
import triton.language as tl  # noqa: E402 - if it is there

from replicas.cuda import rotated_attention, rounded_layer, weights_ahead  # noqa: E402
from replicas.cuda.weights_ahead import ahead_of_product, pieces_of, weights_of  # noqa: E402
from replicas.kernels import weights_ahead as kernel  # noqa: E402
from replicas.kernels.int4_words import words_of  # noqa: E402
from replicas.kernels.piece_weighing import weigh_pieces  # noqa: E402
from replicas.kernels.rotation import rotate_into_pool  # noqa: E402
from replicas.kernels.round_normed import round_normed  # noqa: E402
from replicas.layers.packed_weights import FP8  # noqa: E402
from tests.gpu.paged_case import paged_case  # noqa: E402

pytestmark = pytest.mark.interpreted


@triton.jit
def _mark(pointers, SIZE: tl.constexpr):
    for at in range(0, SIZE, 16):
        tl.store(pointers + at, 1)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetched piece has a one at the begin of each of its 16 bytes."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel, "_fetch", _mark)


def assert_fetched(weights: torch.Tensor, wanted: torch.Tensor) -> None:
    """wanted: by row of the weights, whether each of its 16 bytes is fetched, where that can be seen."""
    found = weights.view(torch.uint8).flatten(1)[:, ::16] != 0
    assert torch.equal(found.cpu(), wanted & (weights.device.type == "cpu"))


def weights_fp8(num_out: int, num_in: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(num_out, num_in, dtype=torch.uint8, device=device).view(FP8)


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_nothing_is_fetched_unless_the_trial_is_on(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_ahead.AHEAD_BYTES == 0
    monkeypatch.setattr(weights_ahead, "launches_early", lambda device: True)
    monkeypatch.setattr(weights_ahead, "AHEAD_BYTES", num_bytes)
    weights = weights_fp8(64, 4096)
    found = ahead_of_product(weights)
    assert found is None if not num_bytes else found is not None and found[0] is weights
    assert ahead_of_product(None) is None


@pytest.mark.parametrize(("num_in", "own"), [(4096, 512), (4096, 0), (1040, 512), (14336, 0)])
@pytest.mark.parametrize("per_row", [256, 700, 100_000])
def test_pieces_lie_within_the_weights(num_in: int, own: int, per_row: int) -> None:
    weights = weights_fp8(48, num_in)
    found = pieces_of(weights, 48 * per_row, own)
    assert found is not None
    assert found.size % 16 == found.start % 16 == found.apart % 16 == 0
    assert found.size <= found.apart
    end = found.start + (found.num_pieces - 1) * found.apart + found.size
    assert weights.nbytes - max(num_in, 4096) < end <= weights.nbytes
    assert found.num_pieces * found.size <= max(48 * per_row, found.num_pieces * 256)


def test_of_words_all_or_the_first_are_fetched() -> None:
    words = words_of(torch.zeros(256, 512, dtype=torch.uint8))
    assert pieces_of(words, 1 << 20) == (16, 4096, 4096, 0)
    assert pieces_of(words, 9000) == (2, 4096, 4096, 0)
    assert pieces_of(words, 4000) is None


def test_every_linear_layer_of_a_card_has_weights() -> None:
    one = torch.zeros(2, 2)
    assert weights_of(SimpleNamespace(values=one, weight=None)) is one  # type: ignore[arg-type]
    assert weights_of(SimpleNamespace(weight=one)) is one  # type: ignore[arg-type]
    assert weights_of(SimpleNamespace()) is None  # type: ignore[arg-type]


def test_a_norm_fetches_what_the_product_behind_it_does_not(marks: None, device: torch.device) -> None:
    x, added, weight = (torch.randn(*size).half().to(device) for size in ((3, 256), (3, 256), (256,)))
    weights = weights_fp8(200, 2048, device)
    ahead = pieces_of(weights, 200 * 300, 512)
    assert ahead is not None
    plain, besides = (round_normed(x, added, weight, 1e-5, FP8, given) for given in (None, (weights, ahead)))
    for one, other in zip(plain, besides, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    wanted = torch.zeros(200, 128, dtype=torch.bool)
    wanted[:, 32:48] = True
    assert_fetched(weights, wanted)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_rotation_fetches_besides(num_tokens: int, marks: None, device: torch.device) -> None:
    torch.manual_seed(2)
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    positions = torch.full_like(slots, 7)
    projected, cos, sin = (torch.randn(num_tokens, width).half().to(device) for width in (8 * 64, 64, 64))
    weights = torch.zeros(300, 1024, dtype=torch.float16, device=device)
    ahead = pieces_of(weights, weights.nbytes)
    assert ahead is not None
    found = []
    for given in (None, (weights, ahead)):
        case = paged_case([9] * num_tokens, 2, 64, torch.float16, device)
        out = rotate_into_pool(
            projected, None, cos, sin, case.kv, case.table, slots, positions, 0, copies_value=True, fetched=given
        )
        found.append((*out, case.kv.nan_to_num(7.0)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert_fetched(weights, torch.ones(300, 128, dtype=torch.bool))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_weighing_of_pieces_fetches_besides(num_rows: int, marks: None, device: torch.device) -> None:
    torch.manual_seed(3)
    num_heads, dim = 4, 64
    partial = torch.randn(2 * num_rows, num_heads, dim).to(device)
    lse = torch.randn(2 * num_rows, num_heads).to(device)
    shares = torch.zeros(2 * num_rows + 2, 4, dtype=torch.int32)
    shares[: num_rows + 1, 3] = 2 * torch.arange(num_rows + 1)  # each row in two pieces
    constants = {"HEAD_DIM": dim, "DIM_PADDED": dim, "ROWS_AT": 0, "IS_EARLY": False}
    weights = words_of(torch.zeros(256, 512, dtype=torch.uint8)).to(device)
    ahead = pieces_of(weights, 40_000)
    assert ahead is not None
    outs = [torch.zeros(num_rows, num_heads, dim, device=device) for _ in "12"]
    for out, given in zip(outs, (None, (weights, ahead)), strict=True):
        weigh_pieces(out, partial, lse, shares.to(device), num_rows, 1, constants, given)
    assert torch.equal(*outs)
    shared = torch.softmax(lse.view(num_rows, 2, num_heads) * math.log(2.0), 1)[..., None]
    assert torch.allclose(outs[0], (shared * partial.view(num_rows, 2, num_heads, dim)).sum(1), atol=1e-5)
    assert_fetched(weights.view(1, -1), (torch.arange(weights.nbytes // 16) < 9 * 256)[None])


@pytest.mark.parametrize("num_tokens", [4, 5])
def test_few_tokens_are_told_to_the_rotation_and_more_to_what_is_behind_attention(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By attention's operator; by the norm's only where our own product follows."""
    told: dict[str, object] = {}

    def rotate(*arguments: object, fetched: object, **others: object) -> tuple[None, None, None]:
        told["rotation"] = fetched
        return None, None, None

    def attend(*arguments: object) -> torch.Tensor:
        told["behind"] = arguments[-1]
        return torch.zeros(num_tokens, 2, 2)

    monkeypatch.setattr(weights_ahead, "launches_early", lambda device: True)
    monkeypatch.setattr(weights_ahead, "AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(rotated_attention, "rotate_into_pool", rotate)
    monkeypatch.setattr(rotated_attention, "attend_written", attend)
    monkeypatch.setattr(rotated_attention, "CudaStep", lambda *given: SimpleNamespace(token_slots=0, positions=0))
    launches = SimpleNamespace(num_row_tokens=num_tokens, fresh=(), num_earlier=0)
    monkeypatch.setattr(rotated_attention.Launches, "unpack", lambda layout: launches)
    weights, none = weights_fp8(64, 4096), torch.empty(0)
    projected = torch.zeros(num_tokens, 8)
    rotated_attention.attend_rotated(
        projected, none, None, None, None, 0.0, none, none, none, none, none, none, none, 1.0, weights
    )
    given, other = ("rotation", "behind") if num_tokens == 4 else ("behind", "rotation")
    assert told[other] is None
    assert told[given] == (weights, pieces_of(weights, 1 << 20))

    def normed(*arguments: object) -> None:
        told["norm"] = arguments[-1]

    monkeypatch.setattr(rounded_layer, "round_normed", normed)
    for num_rows, is_told in ((num_tokens, True), (65, False)):
        rounded_layer.rounded_norm(torch.zeros(num_rows, 8), None, none, 0.0, FP8, weights)
        assert (told["norm"] is not None) is is_told
