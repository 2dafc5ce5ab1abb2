"""cuBLASLt's calls, played by a library that keeps books: which ways it is asked for, and how each is launched."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.cuda import cublas_lt
from replicas.cuda.cublas_lt import CublasLt, NoCublasLt

SIZES = (2048, 6144, 4096)  # rows, outputs, inputs


class Library:
    """Gives one way more for each target than for the one before, of algorithms 100 * target + rank. failing: a call
    that gives an error. missing: one that it does not have. scratch: bytes that the last way needs; state: of it.
    """

    def __init__(self, failing: str = "", missing: str = "", scratch: int = 0, state: int = 0) -> None:
        self.calls: list[str] = []
        self.layouts: list[tuple[int, ...]] = []
        self.attributes: list[tuple[int, int]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.is_broken = False
        self._failing, self._missing, self._scratch, self._state = failing, missing, scratch, state

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._failing:
                return 15
            played = vars(Library).get(f"_{name}")
            return played(self, *arguments) or 0 if played is not None else 0

        return call

    def _cublasLtMatrixLayoutCreate(self, made: Any, *sizes: Any) -> None:
        self.layouts.append(tuple(size.value for size in sizes))
        made._obj.value = len(self.layouts)

    def _cublasLtMatmulDescSetAttribute(self, description: Any, attribute: Any, value: Any, size: Any) -> None:
        assert size.value == ctypes.sizeof(value._obj)
        self.attributes.append((attribute.value, value._obj.value))

    def _cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> None:
        found, count = arguments[-2], arguments[-1]._obj
        target = self.attributes[-1][1]
        count.value = 1 + len([name for name in self.calls if name == "cublasLtMatmulAlgoGetHeuristic"])
        for rank in range(count.value):
            found[rank].algorithm[0] = 100 * target + rank
        found[count.value - 1].workspace_bytes, found[count.value - 1].state = self._scratch, self._state

    def _cublasLtMatmul(self, *arguments: Any) -> int:
        self.launched.append(arguments)
        return 7 if self.is_broken else 0


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=4711))


def algorithms(library: Library, targets: tuple[int, ...] = (0, 90)) -> list[int]:
    ways = CublasLt(library).ways(SIZES, torch.bfloat16, targets)
    return [way.heuristic.algorithm[0] for way in ways]


def test_every_target_is_asked_for_ways_of_matrices_in_columns() -> None:
    library = Library()
    assert algorithms(library) == [0, 1, 9000, 9001, 9002]
    # Of the weight, x and the result: type (bfloat16), rows, columns, and from one column to the next.
    assert library.layouts == [(14, 4096, 6144, 4096), (14, 4096, 2048, 4096), (14, 6144, 2048, 6144)]
    assert library.attributes == [(3, 1), (15, 0), (3, 1), (15, 90)], "the weight transposed; for so many processors"


def test_what_needs_scratch_memory_or_can_not_be_done_is_left_out() -> None:
    assert algorithms(Library(scratch=4096)) == [0, 9000, 9001]
    assert algorithms(Library(state=15)) == [0, 9000, 9001]


def test_the_same_algorithm_is_one_way() -> None:
    library = Library()
    found = CublasLt(library).ways(SIZES, torch.float16, (90, 90))
    assert [way.heuristic.algorithm[0] for way in found] == [9000, 9001, 9002]


def test_a_target_that_it_knows_nothing_for_has_no_ways() -> None:
    assert algorithms(Library(failing="cublasLtMatmulAlgoGetHeuristic")) == []


def test_products_of_32_bits_are_not_asked_for() -> None:
    library = Library()
    assert list(CublasLt(library).ways(SIZES, torch.float32, (0,))) == []
    assert not library.layouts


def test_a_way_is_launched_on_the_current_stream_and_says_whether_it_could_be() -> None:
    library = Library()
    way = next(CublasLt(library).ways((4, 8, 16), torch.bfloat16, (90,)))
    x, weight, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((4, 16), (8, 16), (4, 8)))
    assert way.run(x, weight, out)
    (launched,) = library.launched
    numbers = [argument.value for argument in launched if isinstance(argument, ctypes.c_void_p)]
    of_weight, of_x, of_out = 1, 2, 3
    expected = [weight.data_ptr(), of_weight, x.data_ptr(), of_x, out.data_ptr(), of_out, out.data_ptr(), of_out]
    assert numbers[2:] == [*expected, None, 4711], "no scratch memory; the stream"
    assert (launched[2]._obj.value, launched[7]._obj.value) == (1.0, 0.0)
    library.is_broken = True
    assert not way.run(x, weight, out)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"failing": "cublasLtCreate"}, "cublasLtCreate: status 15"),
        ({"missing": "cublasLtMatmulPreferenceCreate"}, "cublasLtMatmulPreferenceCreate"),
    ],
    ids=["it does not start", "another library"],
)
def test_what_can_not_be_used_says_why(faults: dict[str, str], said: str) -> None:
    with pytest.raises(NoCublasLt, match=said):
        CublasLt(Library(**faults))


def test_a_description_that_it_does_not_take_is_said() -> None:
    library = CublasLt(Library(failing="cublasLtMatmulDescSetAttribute"))
    with pytest.raises(NoCublasLt, match="cublasLtMatmulDescSetAttribute: status 15"):
        list(library.ways(SIZES, torch.bfloat16, (90,)))


def test_no_library_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt.torch.version, "cuda", "0.0")
    with pytest.raises(NoCublasLt, match=r"libcublasLt\.so\.0"):
        CublasLt()
