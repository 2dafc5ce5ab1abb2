"""Passes of chunks that a library attends behind what is in the pool: which there are, and what they compute.

Without a card a function by definition stands for the library, and a graph is a function that is called.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.pool_size import CHUNK_MULTIPLE
from replicas.settings import ModelSettings
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.prefill_batcher import chunk_end
from scheduler.sampling_params import SamplingParams
from tests.gpu.paged_case import by_definition

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import attention_behind, graph_shapes
from replicas.cuda import graphs as cuda_graphs
from replicas.cuda.graph_shapes import lone_prompt_shapes, prompt_shapes
from replicas.cuda.graphs import StepGraphs
from replicas.cuda.runner import CudaRunner
from replicas.cuda.step import Launches

pytestmark = pytest.mark.interpreted

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
INIT = SlotInit(1, 0, SamplingParams(temperature=0.0), None)
TABLE = TableWrite(1, 0, (7, 2, 9, 4, 11, 3, 8))
ALL_SHAPES = {
    "beside rows": prompt_shapes(256, 32_768, has_fresh=True),
    "alone": lone_prompt_shapes(32_768, has_fresh=True),
}


class CalledGraph:
    """Stands for a StepGraph where there is no card."""

    def __init__(self, static_input: torch.Tensor, run: Callable[[], Any], pool: Any, stream: Any) -> None:
        self._input, self._run = static_input, run
        run()

    def replay(self, values: torch.Tensor) -> Any:
        self._input.copy_(values)
        return self._run()


@pytest.fixture
def runner(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaRunner:
    """Of a tiny model, and the library's chunks of 32 tokens behind 32 or 64."""
    monkeypatch.setattr(graph_shapes, "CHUNK_MULTIPLE", 32)
    monkeypatch.setattr(graph_shapes, "_EARLIER", (32, 64))
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 4})
        )
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(cuda_graphs, "StepGraph", CalledGraph)
        monkeypatch.setattr(attention_behind, "library_attention_of", by_definition)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    loaded = load_model(ModelSettings(str(tmp_path), str(tmp_path), "float16", 256, "dummy", False), device)
    for module in loaded.model.modules():  # on a CPU some lie in column order
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight.data = module.weight.data.contiguous()
    return CudaRunner(loaded, KvPool(loaded.kv_layout(16), 16, device), 3, 256)


def graphs_of(runner: CudaRunner) -> StepGraphs:
    shapes = [shape for shape in lone_prompt_shapes(256, has_fresh=True) if shape.num_earlier]
    assert [(shape.length, shape.num_earlier) for shape in shapes] == [(32, 32), (32, 64)]
    graphs = StepGraphs(runner._model, runner._slots, runner._sharing, (), shapes)
    graphs.capture()
    return graphs


def a_chunk(start: int, length: int) -> Slice:
    ids = tuple((7 * (start + i)) % 290 for i in range(length))
    return Slice.of_prompt("prompt", 1, start, ids, (SampleTarget(1, 0),))


@torch.inference_mode()
def test_they_compute_what_a_pass_by_hand_does(runner: CudaRunner) -> None:
    """Which attends by our kernel over the pool. Full chunks and shorter ones; other places have no such pass."""
    graphs = graphs_of(runner)
    runner._slots.apply(StepPlan(0, (INIT,), (TABLE,), (), ()))
    for start, length in ((32, 32), (64, 5)):
        runner._forward(StepPlan(0, (), (), (), (a_chunk(0, start),)))
        plan = StepPlan(1, (), (), (), (a_chunk(start, length),))
        passes = graphs.passes(plan)
        assert passes is not None
        (planned,) = passes
        got = planned.launch().logits[:1].float().clone()
        torch.testing.assert_close(got, runner._forward(plan), atol=2e-3, rtol=2e-2)
    for start, length in ((0, 32), (48, 16), (32, 33), (96, 20)):
        assert graphs.passes(StepPlan(1, (), (), (), (a_chunk(start, length),))) is None


@torch.inference_mode()
def test_there_are_none_where_the_library_has_no_kernel(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("No valid execution plans built.")

    monkeypatch.setattr(attention_behind, "library_attention_of", refusing)
    with caplog.at_level(logging.WARNING):
        graphs = graphs_of(runner)
    assert graphs.passes(StepPlan(1, (), (), (), (a_chunk(32, 32),))) is None
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "no_library_behind"]
    assert record.reason == "No valid execution plans built."


@pytest.mark.parametrize("kind", ALL_SHAPES)
def test_long_prompts_are_cut_where_there_are_passes_for_them(kind: str) -> None:
    """With room for 2,304 tokens: every chunk of one but the last has one that wastes nothing, and that one little."""
    shapes = ALL_SHAPES[kind]
    for prompt_len in range(2305, 16_385, 61):
        start = 0
        while start < prompt_len:
            end = chunk_end(start, prompt_len, 2304, CHUNK_MULTIPLE)
            chunk = Slice.of_prompt("prompt", 0, start, (5,) * (end - start), ())
            shape = next(shape for shape in shapes if shape.holds(chunk, 0))
            if end < prompt_len:
                assert (shape.num_tokens, shape.num_earlier) == (CHUNK_MULTIPLE, start)
                assert shape.is_fresh == (start == 0)
            elif chunk.num_tokens > 1536 + 32 and chunk.num_tokens <= CHUNK_MULTIPLE:
                assert shape.num_earlier == start
            assert shape.num_tokens < chunk.num_tokens + 600
            start = end


@pytest.mark.parametrize(
    ("start", "length", "num_earlier"),
    [
        (2048, 2048, 2048), (2048, 1600, 2048), (2048, 1500, 0), (2048, 10, 0), (2048, 2049, 0), (2000, 2048, 0),
        (6144, 2048, 6144), (14_336, 2048, 14_336), (16_384, 2048, 0), (0, 2048, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ALL_SHAPES)
def test_which_chunks_the_library_attends(kind: str, start: int, length: int, num_earlier: int) -> None:
    """Short ones are over sooner in a shorter pass; beyond what is prepared, and elsewhere, our kernel does it."""
    chunk = Slice.of_prompt("prompt", 0, start, (5,) * length, ())
    shape = next(shape for shape in ALL_SHAPES[kind] if shape.holds(chunk, 0))
    assert shape.num_earlier == num_earlier


def test_prompts_that_are_too_short_for_them_cost_no_graphs() -> None:
    for shapes in (lone_prompt_shapes(2048, has_fresh=True), prompt_shapes(64, 2048, has_fresh=True)):
        assert not any(shape.num_earlier for shape in shapes)
    for has_fresh, count in ((True, 3), (False, 0)):
        shapes = prompt_shapes(64, 8192, has_fresh=has_fresh)
        assert sum(shape.num_earlier > 0 for shape in shapes) == count


@pytest.mark.parametrize("fresh", [(), ((3, 2048, 2),), ((0, 2048, 1), (2048, 3072, 4))])
def test_what_the_host_launches_is_read_as_it_was_packed(fresh: tuple[tuple[int, int, int], ...]) -> None:
    for launches in (Launches(5, 7, 64, 2, 300, fresh), Launches(2, 3, 32, 0, 0, fresh, 9, 3, 20, 4096)):
        assert Launches.unpack(launches.pack()) == launches
