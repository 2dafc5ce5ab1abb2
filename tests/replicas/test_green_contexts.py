"""The driver's calls for a part of a card, played by a library that keeps books."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas import cuda_driver
from replicas.cuda.green_contexts import GreenContexts, NoGreenContexts

_COUNT = slice(96, 100)


class Driver:
    """132 multiprocessors in groups of 8. failing: a call that gives an error. missing: one that it does not have."""

    def __init__(self, failing: str = "", missing: str = "", group: int = 8) -> None:
        self.calls: list[str] = []
        self._failing, self._missing, self._group = failing, missing, group

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._failing:
                return 801
            played = vars(Driver).get(f"_{name}")
            if played is not None:
                played(self, *arguments)
            return 0

        return call

    def _cuDeviceGetDevResource(self, device: Any, resource: Any, kind: Any) -> None:
        resource[_COUNT] = (132).to_bytes(4, "little")

    def _cuDevSmResourceSplitByCount(
        self, first: Any, num_groups: Any, whole: Any, rest: Any, flags: Any, count: Any
    ) -> None:
        given = -(-count.value // self._group) * self._group
        first[_COUNT] = given.to_bytes(4, "little")
        rest[_COUNT] = (int.from_bytes(whole[_COUNT], "little") - given).to_bytes(4, "little")

    def _cuGreenCtxStreamCreate(self, stream: Any, *arguments: Any) -> None:
        ctypes.cast(stream, ctypes.POINTER(ctypes.c_void_p))[0] = 4711

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"operation not supported"


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    external = lambda pointer, device: SimpleNamespace(pointer=pointer, device=device)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)


def contexts(**faults: Any) -> GreenContexts:
    return GreenContexts(torch.device("cuda", 0), Driver(**faults))


def test_a_stream_leaves_the_others_alone() -> None:
    found = contexts()
    assert found.num_processors == 132
    stream: Any = found.stream(92)
    assert (stream.pointer, stream.device) == (4711, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"missing": "cuGreenCtxCreate"}, r"no cuGreenCtxCreate: it is older than CUDA 12\.4"),
        ({"failing": "cuGreenCtxCreate"}, "cuGreenCtxCreate: error 801, operation not supported"),
        ({"group": 16}, "asked for 92 multiprocessors, the card gave 84"),
    ],
    ids=["an old driver", "a card without", "other groups"],
)
def test_what_cannot_be_had_is_said(faults: dict[str, Any], said: str) -> None:
    found = contexts(**faults)
    with pytest.raises(NoGreenContexts, match=said):
        found.stream(92)


def test_a_driver_that_cannot_tell_how_it_is_made() -> None:
    with pytest.raises(NoGreenContexts, match="cuDeviceGetDevResource: error 801"):
        contexts(failing="cuDeviceGetDevResource")


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(NoGreenContexts, match="can't be loaded"):
        GreenContexts(torch.device("cuda", 0))
