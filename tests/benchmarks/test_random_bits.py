"""What another engine's weights of few bits are filled with before it is measured."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import quantised_pieces, random_bits
from benchmarks.gpu.offline_child import VllmEngine
from benchmarks.gpu.quantised_pieces import PIECES, run
from tests.benchmarks.test_quantised_bench import TINY, options

FP8 = torch.float8_e4m3fn


class Model(nn.Module):
    """Turned weights of e4m3, words of 4 bits, bytes, a norm, and an index that is to stay."""

    def __init__(self) -> None:
        super().__init__()
        tensors = {
            "fp8": torch.zeros(96, 64).to(FP8).t(), "words": torch.zeros(64, 80, dtype=torch.int32),
            "bytes": torch.zeros(64, 80, dtype=torch.uint8), "norm": torch.zeros(5000, dtype=torch.bfloat16),
            "index": torch.arange(100, dtype=torch.int32),
        }  # fmt: skip
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_bits, "_FEWEST", 4000)
    monkeypatch.setattr(random_bits, "_NUMBERS_AT_ONCE", 1000)  # several parts of each


def test_weights_of_few_bits_are_random_and_nothing_else_is() -> None:
    model = Model()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert random_bits.fill_few_bits(model) == 96 * 64 + 4 * 64 * 80 + 64 * 80
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}, "graphs read them"
    fp8: Any = model.fp8
    numbers = fp8.float()
    assert not fp8.is_contiguous()
    assert numbers.isfinite().all()
    assert 80.0 < numbers.std() < 120.0
    assert (numbers != 0).float().mean() > 0.99
    words: Any = model.words
    for place in range(0, 32, 4):
        assert len(((words >> place) & 15).unique()) == 16
    assert len(model.bytes.unique()) == 256  # type: ignore[operator]
    assert not model.norm.any()  # type: ignore[operator]
    assert torch.equal(model.index, torch.arange(100, dtype=torch.int32))  # type: ignore[arg-type]


class FakeVllm:
    """In vLLM's place; prompts are computed as fast as weights are zeros."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.llm_engine = types.SimpleNamespace(step=list)
        self.was_allowed = os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1"

    def apply_model(self, fill: Callable[[nn.Module], int]) -> list[int]:
        assert (fill.__module__, fill.__name__) == ("benchmarks.gpu.random_bits", "fill_few_bits"), "it goes by name"
        return [fill(self.model)]


def test_a_piece_of_vllms_is_measured_with_random_weights_and_says_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeVllm] = []

    def llm(**choices: Any) -> FakeVllm:
        made.append(FakeVllm(Model()))
        return made[-1]

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=llm))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    monkeypatch.setattr(quantised_pieces, "make_shape_folder", lambda shape, folder: folder)
    seen: list[tuple[str, bool]] = []

    def is_filled() -> bool:
        return bool(made[0].model.words.any())  # type: ignore[operator, union-attr]

    def prefills(engine: Any, cases: Any) -> dict[str, float]:
        seen.append(("prefills", is_filled()))
        return {"prefill": 74_000.0}

    def measure(*given: Any) -> None:
        seen.append(("measure", is_filled()))

    monkeypatch.setattr(quantised_pieces, "prefills", prefills)
    monkeypatch.setattr(quantised_pieces, "measure", measure)
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(TINY))
    told: dict[str, Any] = {}
    run(PIECES["vllm-fp8"], options(tmp_path, shape=shape, small=False), told.update)
    assert made[0].was_allowed
    assert seen == [("prefills", False), ("measure", True)]
    assert told["prefill_as_loaded_tok_s"] == 74_000
    assert told["filled_gb"] == 0.0


def test_a_model_without_such_weights_is_no_measurement_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=lambda **choices: FakeVllm(nn.Linear(9, 9))))
    with pytest.raises(RuntimeError, match="few bits"):
        VllmEngine("folder").fill_few_bits()
