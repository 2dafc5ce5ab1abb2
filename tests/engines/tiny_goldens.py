"""Golden outputs of the tiny random model, by transformers' generate, made when a test asks for them.

What is tested through a whole engine and is not about the model itself costs a twentieth with these. The bundled
model's goldens are compared in tests/server/test_layouts.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tests.engines.tiny_model import save_tiny_model
from tests.golden.golden_set import Golden
from tests.golden.make_golden import generate

_MIN_MARGIN = 3e-3  # no order of additions turns it


class TinyGoldens:
    """Saves the model into a folder. One thread, so that what is computed does not depend on the machine."""

    def __init__(self, folder: Path) -> None:
        save_tiny_model(folder)
        self.folder = folder
        self._made: dict[tuple[int, int], Golden] = {}
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # stops nowhere

    def of(self, num_prompt_tokens: int, number: int = 0) -> Golden:
        """The number-th prompt of a length: 64 tokens that are neither near ties nor all the same."""
        key = (num_prompt_tokens, number)
        if key not in self._made:
            self._made[key] = next(g for seed in range(100) if (g := self._candidate(key, seed)) is not None)
        return self._made[key]

    def _candidate(self, key: tuple[int, int], seed: int) -> Golden | None:
        rng = random.Random(f"{key} {seed}")
        prompt_ids = [rng.randrange(self._model.config.vocab_size) for _ in range(key[0])]
        torch.set_num_threads(1)
        output_ids, margins = generate(self._model, prompt_ids)
        if min(margins) < _MIN_MARGIN or len(set(output_ids)) < 32:
            return None
        return Golden(f"tiny/{key}", "ids", prompt_ids, prompt_ids, output_ids, margins)
