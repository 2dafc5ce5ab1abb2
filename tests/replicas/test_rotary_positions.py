"""Positions must not depend on a step's other positions: refused by name or by trying, or made static."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from replicas.layers.static_rotary import StaticRotary
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model_support import UnsupportedModel
from replicas.settings import ModelSettings
from tests.engines.random_model import (
    assert_same_text,
    generated_alone,
    prompts_of,
    save_random_model,
    served,
    tiny_config,
)

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def save_phi3(folder: Path) -> None:
    save_random_model(tiny_config("Phi3Config", rope_parameters=LONGROPE, original_max_position_embeddings=128), folder)


def load(folder: Path, max_model_len: int) -> LoadedModel:
    settings = ModelSettings(str(folder), "", "float32", max_model_len, "auto", False)
    return load_model(settings, torch.device("cpu"))


# A short prompt beside a long one; one that grows past the original length; one that comes in chunks.
@pytest.mark.parametrize("lengths", [(20, 200), (120,), (200,)])
def test_longrope_beyond_the_original_length_is_refused(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """One step's longest position picks short or long factors for everybody in it."""
    save_phi3(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"Phi3ForCausalLM.*longrope.*set model\.max_model_len to 128 or less"):
        served(tmp_path, prompts_of(lengths), 256)


@pytest.mark.parametrize("is_split", [True, False])
def test_longrope_within_the_original_length_is_served_right(tmp_path: Path, is_split: bool) -> None:
    save_phi3(tmp_path)
    prompts = prompts_of((20, 104, 64, 5))
    ours = served(tmp_path, prompts, 128, is_split=is_split)
    for prompt, text, alone in zip(prompts, ours, generated_alone(tmp_path, prompts), strict=True):
        assert_same_text(tmp_path, prompt, text, alone)


@pytest.mark.parametrize(
    ("config_class", "parameters"), [("Phi3Config", LONGROPE), ("LlamaConfig", LONGROPE), ("LlamaConfig", DYNAMIC)]
)
def test_what_would_update_frequencies_is_taken_away(
    tmp_path: Path, config_class: str, parameters: dict[str, Any]
) -> None:
    """Frequencies stay as they are, whatever positions come: where they are reached, others would be refused."""
    save_random_model(
        tiny_config(config_class, rope_parameters=parameters, original_max_position_embeddings=128), tmp_path
    )
    positions = torch.tensor([[0, 5, 100]])
    far = torch.tensor([[0, 5, 100, 1000]])
    untouched: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    x = torch.zeros(1, 1, 8)
    expected = untouched.model.rotary_emb(x, positions)
    assert not torch.allclose(untouched.model.rotary_emb(x, far)[0][:, :3], expected[0]), "transformers' own changes"
    rotary = load(tmp_path, 128).model.model.rotary_emb  # type: ignore[union-attr]
    for values, ours in zip(expected, rotary(x, far), strict=True):
        assert torch.equal(ours[:, :3], values)


def test_a_static_kind_is_left_as_it_is(tmp_path: Path) -> None:
    save_random_model(tiny_config("LlamaConfig"), tmp_path)
    rotary: Any = load(tmp_path, 128).model.model.rotary_emb  # type: ignore[union-attr]
    assert type(rotary) is LlamaRotaryEmbedding
    assert "forward" not in vars(rotary)


def _by_longest_position(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    scale = 2.0 if int(position_ids.max()) >= 100 else 1.0
    angles = position_ids[..., None].float() * self.inv_freq * scale
    emb = torch.cat((angles, angles), dim=-1)
    return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def _by_what_was_before(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    self.longest = max(getattr(self, "longest", 0), int(position_ids.max()))
    near = torch.arange(self.longest + 1) if self.longest < 100 else 2 * torch.arange(self.longest + 1)
    angles = near[position_ids][..., None].float() * self.inv_freq
    emb = torch.cat((angles, angles), dim=-1)
    return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@pytest.mark.parametrize("forward", [_by_longest_position, _by_what_was_before])
def test_a_kind_that_no_name_tells_is_found_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Any
) -> None:
    save_random_model(tiny_config("LlamaConfig"), tmp_path)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"model\.rotary_emb \(LlamaRotaryEmbedding\).*max_model_len to 100 or"):
        load(tmp_path, 256)
    load(tmp_path, 100)


def test_what_is_made_static_is_tried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its decorator a kind may still look at the whole step."""

    @wraps(_by_longest_position)
    def decorated(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return _by_longest_position(self, x, position_ids.clamp(max=50))

    save_phi3(tmp_path)
    monkeypatch.setattr(Phi3RotaryEmbedding, "forward", decorated)
    with pytest.raises(UnsupportedModel, match=r"model\.rotary_emb .*max_model_len to 100 or"):
        load(tmp_path, 128)
    assert type(load(tmp_path, 100).model.model.rotary_emb) is StaticRotary  # type: ignore[union-attr]


def test_longrope_under_another_name_is_found_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should transformers name the kind otherwise one day: the module itself is tried."""
    save_phi3(tmp_path)
    for file in ("position_reach", "layers.static_rotary"):
        monkeypatch.setattr(f"replicas.{file}.depends_on_step", lambda kind: False)
    with pytest.raises(UnsupportedModel, match=rf"{Phi3RotaryEmbedding.__name__}.*max_model_len to 128 or less"):
        load(tmp_path, 256)
    load(tmp_path, 128)
