"""Tiny random models of any architecture, and what transformers and we generate with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from replicas.settings import EngineSettings, KvSettings
from tests.engines.local_system import LocalSystem, settings

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # tied, a random model says its last token again and again
}
NUM_TOKENS = 24
# Beside each other, each in one to four chunks of steps of 32 tokens, over the ends of blocks of 8.
PROMPT_LENGTHS = (5, 40, 23, 90)
# Two tokens whose logits differ by less, of the largest, are a tie: rounding decides.
_TIE = 1e-4


def tiny_config(config_class: str, **changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(transformers, config_class)(**{**TINY, **changes})
    return config


def save_random_model(config: PreTrainedConfig, folder: Path) -> None:
    """Weights so large that texts differ, and gains and biases that no layer may forget."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Unlike ids, none of them special."""
    return [[3 + (37 * i + 11 * number + i * i) % 90 for i in range(length)] for number, length in enumerate(lengths)]


@torch.inference_mode()
def generated_alone(folder: Path, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """By transformers' own greedy `generate`, each prompt by itself."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        texts.append(output[0, len(prompt) :].tolist())
    return texts


def small_engine(pool: str, folder: Path, max_model_len: int) -> EngineSettings:
    base = settings(pool, kv_capacity_tokens=1024, max_running_sequences=8, max_batch_tokens=32, kv=KvSettings(8))
    return replace(base, model=replace(base.model, source=str(folder), max_model_len=max_model_len))


def served(
    folder: Path, prompts: Sequence[list[int]], max_model_len: int = 256, *, is_split: bool = True
) -> list[list[int]]:
    """By engines, all prompts at once. is_split: a prefill and a decode engine, else one whose steps mix both."""
    prefill = small_engine("prefill", folder, max_model_len) if is_split else None
    system = LocalSystem(small_engine("decode", folder, max_model_len), prefill)
    try:
        results = system.run([system.generation(prompt, NUM_TOKENS) for prompt in prompts])
    finally:
        system.close()
    return [result.token_ids[0] for result in results]


@torch.inference_mode()
def assert_same_text(folder: Path, prompt: list[int], ours: list[int], alone: list[int]) -> None:
    """Equal, but where transformers' own best two tokens are as good as equal."""
    assert len(ours) == len(alone)
    if ours == alone:
        return
    first = next(i for i, (a, b) in enumerate(zip(ours, alone, strict=True)) if a != b)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt + alone[:first]])).logits[0, -1]
    gap = float(logits[alone[first]] - logits[ours[first]])
    tie = _TIE * float(logits.abs().max())
    assert abs(gap) <= tie, f"{len(prompt)} tokens + {first}: {ours[first]}, not {alone[first]}, {gap:.3g} better"
