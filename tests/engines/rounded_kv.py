"""transformers' own generation with keys and values rounded to e4m3: the reference for KV in 8 bits.

Rounded by the format's definition, number by number of it, and not by torch's conversion, which is what serving uses.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from tests.engines.tiny_model import save_tiny_model
from tests.golden.golden_set import Golden

Scales = tuple[tuple[float, float], ...]

# Sign apart: 4 bits of exponent, 3 of mantissa; the last code of all is no number.
NUMBERS = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
NUM_TOKENS = 64
# A key that another order of sums moves over the middle between two numbers is a sixteenth larger: seldom, in a model
# as small as this.
_MIN_MARGIN = 0.01


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """float32: to the nearest number of the format, of two the one with an even code; the largest beyond it."""
    table = torch.tensor(NUMBERS)
    middles = (table[1:] + table[:-1]) / 2
    code = torch.bucketize(numbers.abs().contiguous(), middles)
    is_tie = numbers.abs() == middles[code.clamp(max=len(middles) - 1)]
    code += (is_tie & (code % 2 == 1)).long()
    return table[code] * numbers.sign()


class RoundedCache(DynamicCache):  # type: ignore[misc]  # it has no types
    """Of one generation."""

    def __init__(self, scales: Scales = ()) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *others: Any, **more: Any
    ) -> Any:
        by_key, by_value = self._scales[layer_idx] if self._scales else (1.0, 1.0)
        key_states = rounded(key_states * (1 / by_key)) * by_key
        value_states = rounded(value_states * (1 / by_value)) * by_value
        return super().update(key_states, value_states, layer_idx, *others, **more)


@torch.inference_mode()
def generate_rounded(
    model: Any, prompt_ids: list[int], num_tokens: int = NUM_TOKENS, scales: Scales = ()
) -> tuple[list[int], list[float]]:
    """Token ids by greedy search, and how far the second best was from each."""
    ids = torch.tensor([prompt_ids])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, output_logits=True,
        return_dict_in_generate=True, cache=RoundedCache(scales),
    )  # fmt: skip
    best = [step[0].topk(2).values.tolist() for step in result.logits]
    return result.sequences[0, len(prompt_ids) :].tolist(), [first - second for first, second in best]


def load_reference(folder: Path | str) -> Any:
    """In float32, stopping nowhere."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


class RoundedGoldens:
    """Of the tiny random model, which it saves into a folder: prompts whose texts no flip of a rounding turns."""

    def __init__(self, folder: Path, scales: Scales = ()) -> None:
        save_tiny_model(folder)
        self.folder = folder
        self._scales = scales
        self._model = load_reference(folder)
        self._made: dict[tuple[int, int, int], Golden] = {}

    def of(self, num_prompt_tokens: int, number: int = 0, num_tokens: int = NUM_TOKENS) -> Golden:
        """The number-th prompt of a length."""
        key = (num_prompt_tokens, number, num_tokens)
        if key not in self._made:
            self._made[key] = next(g for seed in range(400) if (g := self._candidate(key, seed)) is not None)
        return self._made[key]

    def _candidate(self, key: tuple[int, int, int], seed: int) -> Golden | None:
        rng = random.Random(f"{key} {seed}")
        prompt_ids = [rng.randrange(self._model.config.vocab_size) for _ in range(key[0])]
        output_ids, margins = generate_rounded(self._model, prompt_ids, key[2], self._scales)
        if min(margins) < _MIN_MARGIN or len(set(output_ids)) < key[2] // 2:
            return None
        return Golden(f"fp8/{key}", "ids", prompt_ids, prompt_ids, output_ids, margins)
