"""The CUDA runner's own ways through a step: graphs, several behind each other, launches by hand.

On a card as it is. In Triton's interpreter a graph is a function that is called, and nothing is compiled or pinned.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu.logits import SeenLogits, compare, make_cases, reference_rows
from replicas.engine.step_isolation import run_isolated
from replicas.kv.kv_pool import KvPool
from replicas.model.layer_check import check_layers
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace
from replicas.settings import ModelSettings
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.gpu.paged_case import TOLERANCE, relative_error

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import attention as cuda_attention
from replicas.cuda import graph_shapes
from replicas.cuda import graphs as cuda_graphs
from replicas.cuda import runner as cuda_runner
from replicas.cuda import step as cuda_step
from replicas.cuda.gated_layer import GatedLayer
from replicas.cuda.int4_card_linear import Int4CardLinear
from replicas.cuda.quantised_card_linear import QuantisedCardLinear
from replicas.cuda.rotated_attention import RotatedAttention
from replicas.cuda.runner import CudaRunner

pytestmark = pytest.mark.interpreted

LENGTHS = (5, 40, 20, 60, 33, 50)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
# Attention that the kernel between projections and attention knows, and one that it must leave alone.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_attention_heads": 6},
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
}


@pytest.mark.parametrize("largest", [1, 3, 16, 200, 224, 256, 300, 1024])
def test_sizes_of_batches_ascend_to_the_largest_and_waste_little(largest: int) -> None:
    sizes = graph_shapes.batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)
    for num_rows in range(1, largest + 1):
        padded = next(size for size in sizes if size >= num_rows)
        assert padded < num_rows + (16 if num_rows <= 208 else 48), num_rows


class CalledGraph:
    """Stands for a StepGraph where there is no card. num_replays: of all of them."""

    num_replays = 0

    def __init__(self, static_input: torch.Tensor, run: Callable[[], Any], pool: Any, stream: Any) -> None:
        self._input, self._run = static_input, run
        run()

    def replay(self, values: torch.Tensor) -> Any:
        self._input.copy_(values)
        return self.repeat()

    def repeat(self) -> Any:
        CalledGraph.num_replays += 1
        return self._run()


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small prompts take all ways; what only a card has is left out where there is none."""
    monkeypatch.setattr(graph_shapes, "_ALONE", (16, 32, 64))
    monkeypatch.setattr(graph_shapes, "_BESIDE_ROWS", ((3, (16, 32), (64,)), (128, (16,), ())))
    monkeypatch.setattr(cuda_step, "_MIN_FRESH", 32)
    if torch.cuda.is_available():
        return
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    for name, value in {
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: None,
        "Event": lambda: event,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=4),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    monkeypatch.setattr(cuda_attention, "_FRESH_BACKENDS", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    monkeypatch.setattr(cuda_graphs, "StepGraph", CalledGraph)


def load(folder: Path, device: torch.device, model: str) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": [model]} | MODELS[model]))
    settings = ModelSettings(str(folder), str(folder), "float16", 256, "dummy", False)
    loaded = load_model(settings, device)
    for module in loaded.model.modules():  # on a CPU some lie in column order
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight.data = module.weight.data.contiguous()
    return loaded


def make_runner(folder: Path, device: torch.device, model: str = "LlamaForCausalLM") -> CudaRunner:
    return runner_of(load(folder, device, model), device)


def runner_of(loaded: LoadedModel, device: torch.device) -> CudaRunner:
    return CudaRunner(loaded, KvPool(loaded.kv_layout(16), 128, device), len(LENGTHS), 256)


def make_ready_runner(folder: Path, device: torch.device, model: str = "LlamaForCausalLM") -> CudaRunner:
    runner = make_runner(folder, device, model)
    runner.warm_up()
    runner.prepare_thread(256)
    return runner


@pytest.mark.parametrize("model", MODELS)
def test_the_self_check_holds_by_hand_and_by_graphs(device: torch.device, tmp_path: Path, model: str) -> None:
    """By the kernels one by one, then compiled; and either way it sees that an attention's output is another."""
    runner = make_runner(tmp_path, device, model)
    self_check(runner, runner._loaded)
    assert runner.warm_up(), "what is served then is other than what was checked"
    self_check(runner, runner._loaded)
    output = [m for name, m in runner._model.named_modules() if name.endswith(("o_proj", "attention.dense"))][-1]
    output.weight.data.copy_(output.weight.data.flip(0))
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        self_check(runner, runner._loaded)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_the_self_check_of_quantised_layers_holds(device: torch.device, tmp_path: Path, kind: str) -> None:
    """Joined ones too, behind attention that is known, by hand and by graphs."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 128}))
    loaded = load_model(ModelSettings(str(tmp_path), str(tmp_path), "float16", 256, "dummy", False, kind), device)
    runner = runner_of(loaded, device)
    made = Int4CardLinear if kind == "int4" else QuantisedCardLinear
    layers = [module for module in runner._model.modules() if isinstance(module, made)]
    assert len(layers) == 4 * CONFIG["num_hidden_layers"]
    gated = [module for module in runner._model.modules() if isinstance(module, GatedLayer)]
    assert len(gated) == (CONFIG["num_hidden_layers"] if kind == "int4" else 0)
    check_layers(loaded.model, loaded.dtype)
    self_check(runner, loaded)
    assert runner.warm_up()
    self_check(runner, loaded)


@torch.inference_mode()
@pytest.mark.parametrize("model", MODELS)
def test_every_way_is_as_exact_as_transformers(device: torch.device, tmp_path: Path, model: str) -> None:
    runner = make_ready_runner(tmp_path, device, model)
    rotated = [m for m in runner._model.modules() if isinstance(m, RotatedAttention)]
    gated = [m for m in runner._model.modules() if isinstance(m, GatedLayer)]
    assert len(rotated) == len(gated) == (0 if model.startswith("Olmo") else CONFIG["num_hidden_layers"])
    cases = make_cases(LENGTHS, CONFIG["vocab_size"])
    seen = SeenLogits(runner, cases)
    with seen.watch():
        seen.run()
    exact, rounded = (
        reference_rows(str(tmp_path), cases, dtype, device, torch.float16) for dtype in (torch.float32, torch.float16)
    )
    for way in compare(seen.rows, exact, rounded):
        assert way["ours mean"] <= 1.5 * way["HF mean"], way
    assert 0 < seen.num_drawn == seen.num_best


@torch.inference_mode()
def test_a_step_that_fails_between_its_passes_is_run_again_from_its_own_tokens(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_TOKENS_A_PASS", -1000)  # the rows and the prompt in a pass each
    runner = make_ready_runner(tmp_path, device)
    greedy = SamplingParams(temperature=0.0)
    prompt, later = tuple(range(10, 30)), tuple(range(200, 240))
    first = Slice.of_prompt("row", 0, 0, prompt, (SampleTarget(0, 0),))
    tables = (TableWrite(0, 0, (5, 3)), TableWrite(1, 0, (4, 9, 7)))
    begin = StepPlan(0, (SlotInit(0, 0, greedy, None),), tables, (), (first,))
    chunk = Slice.of_prompt("prompt", 1, 0, later, (SampleTarget(1, 0),))
    plan = StepPlan(1, (SlotInit(1, 0, greedy, None),), (), (), (Slice("row", 0, 0, len(prompt)), chunk))
    runner.launch(begin).result()
    expected = runner.launch(plan).result().tokens
    runner.launch(begin).result()
    original, calls = cuda_runner.draw_tokens, []

    def failing(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return original(*arguments, **options)

    monkeypatch.setattr(cuda_runner, "draw_tokens", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.launch(plan)
    again = run_isolated(runner, plan)
    assert not again.errors
    assert set(again.output.tokens) == set(expected)


GREEDY = SamplingParams(temperature=0.0)
TABLES = tuple(TableWrite(slot, 0, tuple(range(8 * slot, 8 * slot + 8))) for slot in range(5))
INITS = tuple(SlotInit(slot, 0, GREEDY, None) for slot in range(5))
ROWS = tuple(Slice(f"row {slot}", 0, slot, 20 + slot) for slot in range(2))


def a_chunk(start: int, length: int, num_targets: int = 1) -> Slice:
    ids = tuple((7 * (start + i)) % 290 for i in range(length))
    return Slice.of_prompt("prompt", 2, start, ids, tuple(SampleTarget(2 + i, i) for i in range(num_targets)))


# Chunks, rows, and how many graphs compute them.
PLANS: tuple[tuple[tuple[Slice, ...], tuple[Slice, ...], int], ...] = (
    ((a_chunk(0, 20),), (), 1),
    ((a_chunk(0, 20),), ROWS, 1),
    ((a_chunk(0, 50),), ROWS, 1),
    ((a_chunk(0, 20, 3),), ROWS, 1),
    ((a_chunk(0, 20, 0),), ROWS, 1),
    ((a_chunk(40, 9),), ROWS, 1),
    ((a_chunk(40, 9),), (), 1),
    ((a_chunk(0, 64, 0), a_chunk(64, 5)), ROWS, 2),
    ((), ROWS, 1),
    ((a_chunk(0, 65),), ROWS, 0),
)


@torch.inference_mode()
def test_graphs_compute_what_a_pass_by_hand_does(device: torch.device, tmp_path: Path) -> None:
    runner = make_ready_runner(tmp_path, device)
    ids = tuple(range(30))
    firsts = [Slice.of_prompt("row", row.slot, 0, ids[: row.start], (SampleTarget(row.slot, 0),)) for row in ROWS]
    runner._slots.apply(StepPlan(0, INITS, TABLES, (), ()))
    assert runner._graphs is not None
    for chunks, rows, num_passes in PLANS:
        for chunk in (*firsts, a_chunk(0, 40)):
            runner._forward(StepPlan(0, (), (), (), (chunk,)))
        runner._slots.last_token[:2] = torch.tensor([17, 200], device=device)
        plan = StepPlan(1, (), (), (), (*rows, *chunks))
        expected = runner._forward(plan)
        passes = runner._graphs.passes(plan) or []
        assert len(passes) == num_passes, plan
        got = [planned.launch().logits[: planned.num_samples].float().clone() for planned in passes]
        if got:
            torch.testing.assert_close(torch.cat(got), expected, atol=2e-3, rtol=2e-2)
        tokens = runner.launch(plan).result().tokens
        places = [(part.request_id, choice) for part in (*rows, *chunks) for choice in part.sampled_choices]
        assert [(token.request_id, token.choice) for token in tokens] == places, plan
        for token, logits in zip(tokens, expected, strict=True):
            assert logits[token.token_id] >= logits.max() - 4e-3
        slots = [row.slot for row in rows] + [2 + choice for _, choice in places[len(rows) :]]
        fed = runner._slots.last_token.tolist()
        assert [fed[slot] for slot in slots] == [token.token_id for token in tokens], plan


@torch.inference_mode()
def test_phases_apart_choose_what_one_launch_does(device: torch.device, tmp_path: Path) -> None:
    """Fused behind the graphs, and by logits that somebody may look at in between; then one of them is forbidden."""
    runner = make_ready_runner(tmp_path, device)
    runner._slots.apply(StepPlan(0, INITS, TABLES, (), ()))
    firsts = [
        Slice.of_prompt("row", row.slot, 0, tuple(range(row.start)), (SampleTarget(row.slot, 0),)) for row in ROWS
    ]

    def begun(plan: StepPlan) -> StepPlan:
        for chunk in (*firsts, a_chunk(0, 40)):
            runner._forward(StepPlan(0, (), (), (), (chunk,)))
        runner._slots.last_token[:2] = torch.tensor([17, 200], device=device)
        return plan

    for chunks, rows, _ in PLANS:
        plan = StepPlan(1, (), (), (), (*rows, *chunks))
        expected, fed = runner.launch(begun(plan)).result(), runner._slots.last_token.clone()
        forwarded = runner.forward(begun(plan))
        assert runner._slots.last_token[:2].tolist() == [17, 200], "nothing is chosen yet"
        assert forwarded.logits is not None
        assert forwarded.logits.shape == (len(expected.tokens), CONFIG["vocab_size"])
        assert runner.choose(forwarded).result() == expected, plan
        assert torch.equal(runner._slots.last_token, fed)
        if expected.tokens:
            forwarded = runner.forward(begun(plan))
            assert forwarded.logits is not None
            second = int(forwarded.logits[0].topk(2).indices[1])
            best = expected.tokens[0].token_id
            tokens = runner.choose(forwarded, all_but(best)).result().tokens
            assert [token.token_id for token in tokens] == [second, *(t.token_id for t in expected.tokens[1:])], plan
            places = SamplePlace.all_of(plan)
            assert int(runner._slots.last_token[places[0].next_slot]) == second


def all_but(token_id: int) -> TokenMasks:
    """Of the first row."""
    words = np.full((1, -(-CONFIG["vocab_size"] // 32)), -1, dtype=np.int32)
    words[0, token_id // 32] ^= np.uint32(1 << (token_id % 32)).view(np.int32)
    return TokenMasks((0,), words)


def test_what_no_kernel_computes_is_refused(device: torch.device, tmp_path: Path) -> None:
    runner = make_runner(tmp_path, device)
    row = Slice("row 0", 0, 0, 20, num_tokens=3, num_sampled=3, token_ids=(1, 2))
    with pytest.raises(ValueError, match="row 0: 3 tokens, 3 of them sampled behind: on CUDA a running sequence is"):
        runner.launch(StepPlan(1, (), (), (), (row,)))
    chunk = Slice.of_prompt("prompt", 1, 0, (1, 2, 3), (SampleTarget(1, 0),))._replace(num_sampled=2)
    with pytest.raises(ValueError, match="prompt: 3 tokens, 2 of them sampled"):
        runner.launch(StepPlan(1, (), (), (), (chunk,)))
    other = KvPool(replace(runner._loaded.kv_layout(16), dtype=torch.bfloat16), 8, device)
    with pytest.raises(
        UnsupportedModel, match=r"a KV pool of torch\.bfloat16: kernels here want the model's torch\.float16"
    ):
        CudaRunner(runner._loaded, other, 2, 64)


@torch.inference_mode()
@pytest.mark.parametrize("model", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_norms_and_biases_are_used_where_they_belong(device: torch.device, tmp_path: Path, model: str) -> None:
    """A new model's norms are all ones and its biases zeros; these are none."""
    loaded = load(tmp_path, device, model)
    own = {name: module for name, module in loaded.model.named_modules() if name.endswith("self_attn")}
    runner = runner_of(loaded, device)
    layers = [module for module in runner._model.modules() if isinstance(module, RotatedAttention)]
    assert len(layers) == len(own) == CONFIG["num_hidden_layers"]
    generator = torch.Generator(device).manual_seed(1)
    for layer in layers:
        for name in ("q_norm", "k_norm"):
            if hasattr(layer, name):
                getattr(layer, name).weight.uniform_(0.2, 3.0, generator=generator)
        if layer.q_proj.joined.linear.bias is not None:  # type: ignore[union-attr, operator]
            layer.q_proj.joined.linear.bias.normal_(generator=generator)  # type: ignore[union-attr, operator]
    prompt = tuple(range(10, 50))
    chunk = Slice.of_prompt("prompt", 0, 0, prompt, (SampleTarget(0, 0),))
    init = SlotInit(0, 0, SamplingParams(temperature=0.0), None)
    plan = StepPlan(0, (init,), (TableWrite(0, 0, (4, 9, 7)),), (), (chunk,))
    runner._slots.apply(plan)
    ours = runner._forward(plan)
    written = runner.pool.tensor.clone()
    for layer, (name, module) in zip(layers, own.items(), strict=True):
        assert type(module).__module__.startswith("transformers.models.")
        module.o_proj = layer.o_proj
        loaded.model.set_submodule(name, module)
    assert relative_error(ours, runner._forward(plan).double().cpu()) < TOLERANCE[torch.float16]
    assert relative_error(written, runner.pool.tensor.double().cpu()) < TOLERANCE[torch.float16]
