"""Which architectures a start refuses, by config.json alone: as the engines do, which is tested one by one
(tests/engines/test_architectures.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.config.model import ModelConfig, find_bundled_gguf
from cluster.launch.checkpoint_facts import checkpoint_facts, config_facts, gguf_facts
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts
from replicas.gguf.file import read_gguf
from replicas.model_support import UnsupportedModel
from tests.cluster.test_wrong_starts import LLAMA, ROOT, model
from tests.engines.architectures import REFUSED, SERVED, Case
from tests.engines.random_model import tiny_config
from tests.replicas.test_gguf_models import LLAMA3
from tests.replicas.tiny_gguf import gguf_of, llama3_factors, tiny_model

# Only a pass through the model shows that it attends to later tokens, or counts positions in its own way.
_SEEN_LATER = {"bert", "roberta", "roberta-decoder"}


def facts(case: Case, folder: Path) -> ModelFacts:
    if not hasattr(transformers, case.config_class):
        pytest.skip(f"this transformers has no {case.config_class}")
    config = tiny_config(case.config_class, **case.changes)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    config.architectures = [name] if name else None
    config.save_pretrained(folder)
    return config_facts(folder / "config.json", False, None)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_what_engines_serve_may_start(case: Case, tmp_path: Path) -> None:
    found = facts(case, tmp_path)
    assert (found.longest_request() or 0) >= case.max_model_len
    assert found.kv_numbers_per_token


@pytest.mark.parametrize("case", [case for case in REFUSED if case.name not in _SEEN_LATER], ids=lambda case: case.name)
def test_what_engines_refuse_is_refused_before(case: Case, tmp_path: Path) -> None:
    refusal = ""
    try:
        longest = facts(case, tmp_path).longest_request() or 0
    except UnsupportedModel as error:
        longest, refusal = 0, str(error)
    assert longest < case.max_model_len
    assert "\n" not in refusal


def test_nothing_that_is_refused_later_is_named_in_vain() -> None:
    assert {case.name for case in REFUSED} >= _SEEN_LATER


@pytest.mark.parametrize(
    ("config_class", "changes", "num_kv_heads"),
    [
        ("GPTBigCodeConfig", {"multi_query": True}, 1),
        ("GPT2Config", {"num_key_value_heads": None}, 4),
        ("LlamaConfig", {"num_key_value_heads": 2}, 2),
        ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 16}, 2),  # of half the width
    ],
)
def test_kv_is_weighed_by_its_heads(
    config_class: str, changes: dict[str, Any], num_kv_heads: int, tmp_path: Path
) -> None:
    changes = {name: value for name, value in changes.items() if value is not None} | {"num_hidden_layers": 3}
    if config_class == "GPT2Config":
        transformers.GPT2Config(n_embd=32, n_head=4, n_layer=3).save_pretrained(tmp_path)
    else:
        tiny_config(config_class, **changes).save_pretrained(tmp_path)
    assert config_facts(tmp_path / "config.json", False, None).kv_numbers_per_token == 3 * 2 * num_kv_heads * 8


def test_what_is_said_of_the_bundled_model_is_what_its_file_says() -> None:
    path = find_bundled_gguf()
    assert path is not None
    assert gguf_facts(read_gguf(path)) == BUNDLED_FACTS


def test_what_is_known_of_a_gguf_without_torch_is_what_is_known_with_it(tmp_path: Path) -> None:
    """Also of one whose factors of positions only torch code can read: Llama 3.1 and later have them."""
    model = tiny_model("LlamaConfig")
    gguf = gguf_of(model, "llama")
    gguf.settings["rope.freq_base"] = LLAMA3["rope_theta"]
    gguf.tensors["rope_freqs.weight"] = llama3_factors(LLAMA3, model.config.head_dim)
    path = gguf.write(tmp_path / "model.gguf")
    program = (
        "import sys; from pathlib import Path; from replicas.gguf.file import read_gguf; "
        "from cluster.launch.checkpoint_facts import gguf_facts; print(gguf_facts(read_gguf(Path(sys.argv[1])))); "
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = gguf_facts(read_gguf(path))
    assert done.stdout.splitlines()[-1] == repr(found)
    assert found.kv_numbers_per_token == 2 * 2 * 2 * 16
    assert found.max_positions == 512


def test_a_folders_weights_are_counted(tmp_path: Path) -> None:
    files = model(LLAMA)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert checkpoint_facts(ModelConfig(source=str(tmp_path))) == ModelFacts(512, 64, 2 * 2 * 2 * 16, num_linear=0)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "one.safetensors"}}))
    assert checkpoint_facts(ModelConfig(source=str(tmp_path))).num_weights == 64
    (tmp_path / "one.safetensors").unlink()
    dummy = ModelConfig(source=str(tmp_path), load_format="dummy")
    assert checkpoint_facts(dummy).num_weights is None


def test_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    trap = b"raise SystemExit('it was run')"
    config = LLAMA | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.M"}}
    for name, content in model(config, mine_py=trap).items():
        (tmp_path / name).write_bytes(content)
    trusted = ModelConfig(source=str(tmp_path), trust_remote_code=True)
    assert checkpoint_facts(trusted) == ModelFacts(num_weights=64)


def test_bytes_of_weights_that_stay_quantised(tmp_path: Path) -> None:
    """Of a quantised folder as they are in its files, of model.quantise as they will be; the rest in the dtype."""
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 16),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(32, 16, dtype=torch.int8),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(32, 1),
    }
    said = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
    }  # fmt: skip
    for name, content in model(LLAMA | {"quantization_config": said}).items():
        (tmp_path / name).write_bytes(content)
    save_file(tensors, tmp_path / "model.safetensors")
    facts = checkpoint_facts(ModelConfig(source=str(tmp_path)))
    assert facts.weights_bytes("float32") == (128 + 32) * 4 + 512
    assert facts.weights_bytes("bfloat16") == (128 + 32) * 2 + 512
    with pytest.raises(UnsupportedModel, match="quantised as it is"):
        checkpoint_facts(ModelConfig(source=str(tmp_path), quantise="int8"))
    refused = said | {"format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_bytes(model(LLAMA | {"quantization_config": refused})["config.json"])
    with pytest.raises(UnsupportedModel, match=r"quantization_config\.format: 'nvfp4-pack-quantized'"):
        checkpoint_facts(ModelConfig(source=str(tmp_path)))


def test_bytes_of_weights_that_are_quantised_at_load() -> None:
    of = {kind: BUNDLED_FACTS.quantised(kind).weights_bytes("float32") / 1e6 for kind in ("none", "int8", "int4")}
    assert of["none"] == pytest.approx(538.1, abs=0.1)
    # As they were measured, loaded.
    assert of["int8"] == pytest.approx(220.2, rel=0.01)
    assert of["int4"] == pytest.approx(174.8, rel=0.01)
    assert BUNDLED_FACTS.quantised("int8").converted_bytes() == BUNDLED_FACTS.weights_bytes("float32")
