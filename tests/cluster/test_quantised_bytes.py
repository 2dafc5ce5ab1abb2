"""What a quantised model weighs before anything starts is what it then weighs in a replica: in every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cluster.config.file import config_of
from cluster.launch.checkpoint_facts import checkpoint_facts, folder_facts
from cluster.launch.fit import describe_memory
from cluster.launch.machine import Machine
from replicas.model.quantised_model import read_quantised
from replicas.quantisation.scheme_reading import chosen_scheme
from tests.replicas.quantised_checkpoints import save_quantised, tiny_llama
from tests.replicas.quantised_dialects import CASES

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}


def ratio(folder: Path, dtype: str, quantise: str) -> float:
    """What is said, of what is there."""
    (folder / "tokenizer.json").write_text("{}")
    facts = folder_facts(folder, False, quantise)
    said = facts.weights_bytes(dtype)
    config = AutoConfig.from_pretrained(folder)
    scheme = chosen_scheme(config, quantise)
    assert scheme is not None
    assert facts.scheme == (scheme.describe() if quantise == "none" else quantise)
    model = read_quantised(str(folder), config, scheme, getattr(torch, dtype), torch.device("cpu"), False)
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return said / sum(tensor.nbytes for tensor in tensors.values())


QUICK = ("fp8 channel token", "fp8 blocks", "awq", "gptq in an order")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Groups of 32 are the smallest that are served: of larger ones scales weigh less, and less is guessed."""
    save_quantised(tmp_path, tiny_llama(**SIZES), CASES[name].said, CASES[name].pack)
    assert 0.985 < ratio(tmp_path, "bfloat16", "none") < 1.035
    assert 0.985 < ratio(tmp_path, "float32", "none") < 1.07, "scales stay in 16 bits"


def test_people_are_told() -> None:
    """Of the bundled model: 134.5 million weights, 106.2 of them of linear layers; these and its KV in 8 bits."""
    values = {"model": {"quantise": "int8"}, "kv": {"dtype": "fp8"}, "pools": {"decode": {"kv_capacity_tokens": 8192}}}
    config = config_of({"layout": "colocated", **values})
    machine = Machine(2, 24 * 10**9, 20 * 10**9)
    said = describe_memory(config, machine, checkpoint_facts(config.model))
    assert said.startswith("weights 1 x 220 MB in int8 + KV cache 94 MB in fp8; this machine has 24.0 GB")


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_of_weights_that_are_rounded_at_load(kind: str, tmp_path: Path) -> None:
    tiny_llama(**SIZES).save_pretrained(tmp_path)
    assert 0.98 <= ratio(tmp_path, "bfloat16", kind) < 1.04
