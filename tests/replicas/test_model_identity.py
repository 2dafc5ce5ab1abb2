"""Whom a replica may work with goes by what it has loaded: every bit of it, and by nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from replicas.model.identity_digests import tokenizer_digest
from replicas.model.model_loader import load_model
from replicas.model.weights_digest import digest_weights
from replicas.model_identity import ModelIdentity, model_of
from replicas.settings import ModelSettings
from tests.engines.tiny_model import save_tiny_model

Change = Callable[[dict[str, torch.Tensor]], None]


def identity(folder: Path, dtype: str = "float32", *, trusted: bool = False) -> ModelIdentity:
    settings = ModelSettings(str(folder), "", dtype, 128, "auto", trust_remote_code=trusted)
    return load_model(settings, torch.device("cpu")).identity


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x", "bos_token": "a"}')
    return folder


@pytest.fixture
def other(tiny: Path, tmp_path: Path) -> Path:
    """A copy elsewhere, of another time."""
    folder = tmp_path / "other"
    shutil.copytree(tiny, folder, copy_function=shutil.copy)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    return folder


def test_a_copy_elsewhere_is_the_same(tiny: Path, other: Path) -> None:
    assert identity(tiny) == identity(other)
    assert str(identity(tiny)) == str(identity(other))


def one_number(t: dict[str, torch.Tensor]) -> None:
    weight = t["model.layers.1.mlp.up_proj.weight"]
    weight[17, 5] = torch.nextafter(weight[17, 5], torch.tensor(9.0))


def one_word(t: dict[str, torch.Tensor]) -> None:
    t["model.embed_tokens.weight"][300] += 0.01


def two_layers_change_places(t: dict[str, torch.Tensor]) -> None:
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)]
    t[names[0]], t[names[1]] = t[names[1]].clone(), t[names[0]].clone()


def two_rows_change_places(t: dict[str, torch.Tensor]) -> None:
    t["lm_head.weight"][[3, 4]] = t["lm_head.weight"][[4, 3]]


def two_columns_change_places(t: dict[str, torch.Tensor]) -> None:
    t["lm_head.weight"][:, [3, 40]] = t["lm_head.weight"][:, [40, 3]]


def a_square_matrix_transposed(t: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    t[name] = t[name].t().contiguous()


def a_sign(t: dict[str, torch.Tensor]) -> None:
    t["model.norm.weight"][0] *= -1


@pytest.mark.parametrize(
    "change",
    [one_number, one_word, two_layers_change_places, two_rows_change_places, two_columns_change_places,
     a_square_matrix_transposed, a_sign],
)  # fmt: skip
def test_other_weights_of_the_same_names_and_sizes_are_another_model(change: Change, tiny: Path, other: Path) -> None:
    path = other / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    assert path.stat().st_size == (tiny / "model.safetensors").stat().st_size
    assert identity(tiny).differences(identity(other)) == ("weights",)


def test_the_number_type_and_the_config_count(tiny: Path, other: Path) -> None:
    assert identity(tiny).differences(identity(tiny, "bfloat16")) == ("weights", "dtype")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (other / "config.json").write_text(json.dumps(config))
    assert identity(tiny).differences(identity(other)) == ("config",)


_CODE = """
from transformers import LlamaForCausalLM
from .scale import SCALE

class OwnForCausalLM(LlamaForCausalLM):
    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits * SCALE
        return output
"""


def test_code_that_a_model_brings_counts(tiny: Path, other: Path) -> None:
    """Replaced under a running server, it would be the same weights with other texts."""
    config = json.loads((other / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (other / "config.json").write_text(json.dumps(config))
    (other / "own.py").write_text(_CODE)
    (other / "scale.py").write_text("SCALE = 1.0")
    first = identity(other, trusted=True)
    copy = other.with_name("copy")
    shutil.copytree(other, copy)
    assert identity(copy, trusted=True) == first
    (other / "scale.py").write_text("SCALE = -1.0")
    assert identity(other, trusted=True).differences(first) == ("config",)
    assert first.differences(identity(tiny)) == ("config",)


def test_another_vocabulary_counts_and_another_chat_template_does_not(tiny: Path, other: Path) -> None:
    (other / "tokenizer_config.json").write_text('{"chat_template": "y", "bos_token": "a"}')
    assert tokenizer_digest(str(tiny)) == tokenizer_digest(str(other))
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    assert identity(tiny).differences(identity(other)) == ("tokenizer",)
    (other / "tokenizer.json").unlink()
    (other / "tokenizer_config.json").unlink()
    assert tokenizer_digest(str(other)) == "none"


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_file_of_the_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json of the model is no JSON object"):
        tokenizer_digest(str(tmp_path))


def test_tensors_of_odd_sizes_and_types_are_digested() -> None:
    def model(value: int) -> nn.Module:
        module = nn.Module()
        module.register_buffer("odd", torch.arange(7, dtype=torch.float16) + value)
        module.register_buffer("flags", torch.tensor([True, False, bool(value)]))
        module.register_buffer("bytes", torch.ones(3, 5, dtype=torch.int8))
        module.register_buffer("scalar", torch.tensor(2.0))
        module.register_buffer("nothing", torch.empty(0, 4))
        module.register_buffer("cube", torch.ones(2, 3, 4))
        return module

    assert digest_weights(model(0)) == digest_weights(model(0))
    assert digest_weights(model(0)) != digest_weights(model(1))


def test_its_text_tells_what_differs() -> None:
    one = ModelIdentity("aa", "cc", "tt", "float32", "int8-channel-token", "2x16:float32")
    assert str(one) == "weights=aa config=cc tokenizer=tt dtype=float32 scheme=int8-channel-token kv=2x16:float32"
    assert ModelIdentity.parse(str(one)) == one
    assert model_of(str(one)) == "weights=aa config=cc tokenizer=tt dtype=float32 scheme=int8-channel-token"
    assert ModelIdentity.parse(model_of(str(one))) == replace(one, kv="")
    assert ModelIdentity.parse("weights=aa config=bb tokenizer=tt dtype=x kv=y").differences(one) == (
        "config", "dtype", "scheme", "kv",
    )  # fmt: skip
    assert ModelIdentity.parse("something else") != one
    assert ModelIdentity.parse("something else") == ModelIdentity.parse("something else")
