"""Which way a product takes on a part of a card; its clock moves when somebody runs something."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from replicas.cuda.cublas_lt import ALIGNMENT_BYTES, NoCublasLt
from replicas.cuda.part_products import PartProducts, fastest, part_here

M, N, K = 96, 64, 32


class Clock:
    """Of the card, in ms. torchs_ms: what torch's own product takes."""

    def __init__(self, torchs_ms: float = 10.0) -> None:
        self.now_ms, self.torchs_ms, self.num_torchs = 0.0, torchs_ms, 0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self.at_ms = clock, 0.0

    def record(self) -> None:
        self.at_ms = self._clock.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


@dataclass(eq=False)
class Way:
    """Takes so many ms; None: can't be launched. Leaves its number in the result."""

    clock: Clock
    ms: float | None
    number: float = 0.0
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
        assert x.is_contiguous()
        assert weight.is_contiguous()
        assert not any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in (x, weight, out))
        if self.ms is None:
            return False
        self.clock.now_ms += self.ms
        self.shapes.append((*out.shape, x.shape[1]))
        out.fill_(self.number)
        return True


class Library:
    """Has these ways for any product; error: none, for this reason."""

    def __init__(self, ways: Sequence[Way], error: str = "") -> None:
        self._ways, self._error = ways, error
        self.asked: list[tuple[Any, ...]] = []

    def ways(self, sizes: tuple[int, int, int], dtype: torch.dtype, targets: Sequence[int]) -> Iterator[Any]:
        self.asked.append((sizes, dtype, tuple(targets)))
        if self._error:
            raise NoCublasLt(self._error)
        yield from self._ways


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    played = Clock()
    monkeypatch.setattr(torch.cuda, "Event", played.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    linear = torch.nn.functional.linear

    def timed(*arguments: Any) -> torch.Tensor:
        played.now_ms += played.torchs_ms
        played.num_torchs += 1
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", timed)
    return played


def products(*ways: Way, error: str = "", num_processors: int | None = 92) -> tuple[PartProducts, Library]:
    library: Any = Library(ways, error)
    return PartProducts(num_processors, library), library


def aligned(*shape: int, offset: int = 0) -> torch.Tensor:
    """bfloat16 zeros, so many elements behind an aligned address."""
    count = torch.Size(shape).numel()
    memory = torch.zeros(count + ALIGNMENT_BYTES, dtype=torch.bfloat16)
    first = -memory.data_ptr() % ALIGNMENT_BYTES // memory.element_size() + offset
    return memory[first : first + count].view(shape)


@pytest.fixture(autouse=True)
def aligned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card's allocator gives them."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: aligned(*shape))


def number_of(part: PartProducts, rows: torch.Tensor | None = None, *, is_choosing: bool = True) -> float | None:
    """Of the way by which a product was made; None: torch is to do it."""
    with part.used(is_choosing=is_choosing):
        out = part.product(aligned(M, K) if rows is None else rows, aligned(N, K))
    return None if out is None else float(out[0, 0])


def test_the_fastest_is_taken_and_kept(clock: Clock) -> None:
    ways = [Way(clock, 9.0, 1), Way(clock, None, 2), Way(clock, 7.0, 3), Way(clock, 8.0, 4)]
    part, library = products(*ways)
    assert number_of(part) == 3
    assert library.asked == [((M, N, K), torch.bfloat16, (0, 90, 86, 84))]
    assert number_of(part, is_choosing=False) == 3
    assert len(library.asked) == 1, "it is known"
    assert set(ways[2].shapes) == {(M, N, K)}


def test_of_ways_that_take_as_long_the_first() -> None:
    ways: list[Any] = ["first", "second", "third"]
    assert fastest(ways, lambda way: None if way == "second" else 1.0) == [(1.0, "first"), (1.0, "third")]


def test_torchs_own_stays_where_it_is_as_fast(clock: Clock) -> None:
    part, library = products(Way(clock, 10.0, 1), Way(clock, 12.0, 2))
    assert number_of(part) is None
    assert clock.num_torchs > 0
    assert number_of(part) is None
    assert len(library.asked) == 1, "it is not tried again"


def test_nothing_is_timed_where_the_library_has_nothing(clock: Clock) -> None:
    part, _ = products()
    assert number_of(part) is None
    part, _ = products(Way(clock, None))
    assert number_of(part) is None
    assert clock.num_torchs == 0


def test_products_that_are_new_at_run_time_or_while_a_graph_is_captured_are_torchs(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, library = products(Way(clock, 1.0, 1))
    assert number_of(part, is_choosing=False) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert number_of(part) is None
    assert library.asked == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert number_of(part) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert number_of(part) == 1, "known ways are captured"


def test_tensors_that_are_not_aligned_are_torchs_and_others_are_not_spoilt(clock: Clock) -> None:
    part, library = products(Way(clock, 1.0, 1))
    assert number_of(part) == 1
    assert number_of(part, aligned(M, K, offset=8)) is None
    assert number_of(part) == 1
    fresh, _ = products(Way(clock, 1.0, 1))
    assert number_of(fresh, aligned(M, K, offset=8)) is None
    assert len(library.asked) == 1


def test_rows_that_are_not_contiguous_are_made_so(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = products(Way(clock, 1.0, 1))
    contiguous = aligned(M, K)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: contiguous)
    assert number_of(part, aligned(K, M).t()) == 1


def test_a_way_that_can_not_be_launched_any_more_is_given_up_and_said(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    way = Way(clock, 1.0, 1)
    part, _ = products(way)
    assert number_of(part) == 1
    way.ms = None
    with caplog.at_level(logging.WARNING):
        assert number_of(part) is None
        assert number_of(part) is None
    assert [vars(record)["event"] for record in caplog.records] == ["product_way_failed"]
    assert vars(caplog.records[0])["product"] == [M, N, K]


def test_a_library_that_fails_is_said_and_torch_goes_on(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    part, library = products(error="cublasLtMatrixLayoutCreate: status 7")
    with caplog.at_level(logging.WARNING):
        assert number_of(part) is None
        assert number_of(part) is None
    (record,) = caplog.records
    assert vars(record)["event"] == "no_product_ways"
    assert vars(record)["reason"] == "cublasLtMatrixLayoutCreate: status 7"
    assert len(library.asked) == 1


@pytest.mark.parametrize("num_processors", [None, 92])
def test_without_a_part_or_a_library_nobody_is_asked(num_processors: int | None) -> None:
    part = PartProducts(num_processors, None)
    with part.used():
        assert part_here() is None
    whole, _ = products(num_processors=None)
    with whole.used(is_choosing=True):
        assert part_here() is None


def test_a_part_holds_for_its_thread_and_until_the_end_of_its_block() -> None:
    one, _ = products()
    other, _ = products(num_processors=68)
    whole, _ = products(num_processors=None)
    seen: list[Any] = []

    def look() -> None:
        with other.used():
            seen.append(part_here())
        seen.append(part_here())

    with one.used():
        assert part_here() is one
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        with whole.used():
            assert part_here() is None
        assert part_here() is one
        with pytest.raises(RuntimeError, match="a step failed"), other.used(is_choosing=True):
            raise RuntimeError("a step failed")
        assert part_here() is one
    assert part_here() is None
    assert seen == [other, None]


def test_a_block_that_failed_chooses_no_more(clock: Clock) -> None:
    part, library = products(Way(clock, 1.0, 1))
    with pytest.raises(RuntimeError, match="out of memory"), part.used(is_choosing=True):
        raise RuntimeError("out of memory")
    assert number_of(part, is_choosing=False) is None
    assert library.asked == []


@pytest.fixture
def skinny_linear() -> Any:
    pytest.importorskip("triton", reason="a CPU torch comes without triton")
    from replicas.cuda import skinny_linear

    return skinny_linear


def linear_of(
    skinny_linear: Any, part: PartProducts, x: torch.Tensor, bias: nn.Parameter | None = None
) -> torch.Tensor:
    layer = skinny_linear.SkinnyLinear(nn.Parameter(aligned(N, K)), bias)
    with torch.inference_mode(), part.used(is_choosing=True):
        result: torch.Tensor = layer(x)
    return result


def test_a_layer_asks_its_part_for_many_rows(skinny_linear: Any, clock: Clock) -> None:
    part, _ = products(Way(clock, 1.0, 1))
    assert linear_of(skinny_linear, part, aligned(1, M, K)).unique().tolist() == [1.0]
    assert linear_of(skinny_linear, part, aligned(1, M, K)).shape == (1, M, N)
    assert skinny_linear.part_here() is None


def test_a_layer_with_a_bias_is_torchs(skinny_linear: Any, clock: Clock) -> None:
    part, library = products(Way(clock, 1.0, 1))
    bias = nn.Parameter(torch.full((N,), 3.0, dtype=torch.bfloat16))
    assert linear_of(skinny_linear, part, aligned(1, M, K), bias).unique().tolist() == [3.0]
    assert library.asked == []


def test_a_layer_outside_of_any_part_is_torchs(skinny_linear: Any, clock: Clock) -> None:
    layer = skinny_linear.SkinnyLinear(nn.Parameter(aligned(N, K)), None)
    with torch.inference_mode():
        assert layer(aligned(1, M, K)).unique().tolist() == [0.0]
    assert clock.num_torchs == 1
