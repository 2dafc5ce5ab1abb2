"""Products of prompts on a part of a card: those of torch, on every share, launched and captured. A card only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.cuda.cublas_lt import CublasLt
from replicas.cuda.green_contexts import GreenContexts
from replicas.cuda.part_products import PartProducts
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.settings import ModelSettings
from scheduler.lane_split import LaneShare, estimated_shares
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.lane_runner import DividedRunner
from replicas.cuda.runner import CudaRunner
from tests.gpu.paged_case import relative_error

GREEDY = SamplingParams(temperature=0.0)
# Outputs and inputs of a layer of Llama-3.1-8B and of Qwen3-0.6B.
LAYERS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 1024), (1024, 3072)]
ROWS = (128, 1024, 2048)
CONFIG = {  # two layers of Llama-3.1-8B: smaller products may have no way of their own
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
LENGTHS = (100, 300, 700, 1500, 2048)


def shares(device: torch.device) -> tuple[tuple[LaneShare, torch.cuda.Stream], ...]:
    contexts = GreenContexts(device)
    found = estimated_shares(contexts.num_processors)
    return tuple((share, contexts.stream(share.num_processors or 0)) for share in found)


def captured(part: PartProducts, stream: torch.cuda.Stream, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product's result after a replay."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with part.used(), torch.cuda.graph(graph, stream=stream):
        out = part.product(x, weight)
    assert out is not None
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.timeout(300)
@torch.inference_mode()
def test_products_are_torchs_to_rounding_on_every_share(device: torch.device) -> None:
    """Sums in float32 of all inputs, in one order or another, and rounded once: a bit of the result at most."""
    torch.manual_seed(5)
    library, num_chosen, unlike = CublasLt(), 0, []
    for share, stream in shares(device):
        part = PartProducts(share.num_processors, library)
        for num_out, num_in in LAYERS:
            weight = torch.randn(num_out, num_in, device=device, dtype=torch.bfloat16) * num_in**-0.5
            for num_rows in ROWS:
                x = torch.randn(num_rows, num_in, device=device, dtype=torch.bfloat16)
                expected = torch.nn.functional.linear(x, weight)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream), part.used(is_choosing=True):
                    out = part.product(x, weight)
                torch.cuda.synchronize()
                if out is None:
                    continue
                num_chosen += 1
                assert relative_error(out, expected.double()) < 2**-8, (share, num_rows, num_out, num_in)
                assert torch.equal(captured(part, stream, x, weight), out), (share, num_rows, num_out, num_in)
                if not torch.equal(out, expected):
                    unlike.append((share.num_processors, num_rows, num_out, num_in))
    assert num_chosen > 0, "no product has a way of its own: nothing was tested"
    print(f"{num_chosen} products have ways of their own; not torch's to the last bit: {unlike or 'none'}")


def loaded_into(kind: type[CudaRunner], folder: Path, device: torch.device) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    loaded = load_model(ModelSettings(str(folder), str(folder), "bfloat16", 4096, "dummy", False), device)
    runner = kind(loaded, KvPool(loaded.kv_layout(16), 512, device), 8, 4096)
    runner.warm_up()
    return runner


def texts(rows: Any, prompts: Any) -> list[list[int]]:
    """Of prompts by one runner and rows by the other: the first token and eight behind it."""
    found = []
    for length in LENGTHS:
        ids = tuple(1 + (7 * index + length) % 3000 for index in range(length))
        tables = (TableWrite(0, 0, tuple(range(length // 16 + 2))),)
        chunk = Slice.of_prompt("prompt", 0, 0, ids, (SampleTarget(0, 0),))
        tokens = [prompts.launch(StepPlan(0, (SlotInit(0, 0, GREEDY, None),), tables, (), (chunk,))).result().tokens]
        for number in range(8):
            plan = StepPlan(1 + number, (), (), (), (Slice("prompt", 0, 0, length + number),))
            tokens.append(rows.launch(plan).result().tokens)
        found.append([token.token_id for step in tokens for token in step])
    return found


@pytest.mark.timeout(600)
@torch.inference_mode()
def test_texts_with_lanes_are_those_without(device: torch.device, tmp_path: Path) -> None:
    """In bfloat16, whose prompts take ways of their own: in float32 there are none. Random weights: texts that differ
    have a tie within rounding in front, so most are to be the same."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = (
        loaded_into(kind, tmp_path / name, device) for kind, name in ((CudaRunner, "one"), (DividedRunner, "two"))
    )
    expected = texts(one, one)
    assert texts(one, one) == expected
    largest = max(two.shares, key=lambda share: share.num_processors)
    for share in two.shares:
        beside = two.beside(share)
        num_ways = sum(way is not None for way in beside._products._ways.values())
        assert (num_ways > 0) == (share is largest), "ways are chosen on the largest share only"
        found = texts(two, beside)
        assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(LENGTHS) - 1, share
