"""A tiny random model, for tests of many long texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replicas.settings import EngineSettings
from tests.engines.local_system import settings


def save_tiny_model(folder: Path) -> None:
    """Weights that are large enough for texts that do not all look the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def tiny_settings(pool: str, folder: Path, **changes: Any) -> EngineSettings:
    base = settings(pool, **changes)
    return replace(base, model=replace(base.model, source=str(folder), max_model_len=512))
