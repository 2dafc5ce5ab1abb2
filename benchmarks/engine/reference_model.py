"""transformers' own model and `generate`, as the yardstick."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class _TokenTimes(BaseStreamer):  # type: ignore[misc]
    """Notes when each generated token came. `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        self.times_s.append(time.monotonic())

    def end(self) -> None:
        pass


class ReferenceModel:
    """The same weights as the engine's, float32, transformers' default attention and cache."""

    def __init__(self, folder: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # generate all that is asked for
        self._model.generation_config.pad_token_id = 0
        self.vocab_size: int = self._model.config.vocab_size

    @torch.inference_mode()
    def generate(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy. (tokens, time of each). Blocks."""
        ids = torch.tensor([prompt_ids])
        streamer = _TokenTimes()
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, streamer=streamer
        )
        tokens: list[int] = output[0, len(prompt_ids) :].tolist()
        return tokens, streamer.times_s[1:]

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> None:
        """One forward pass that fills a cache and computes the last position's logits. Blocks."""
        self._model(input_ids=torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
