"""What logits of a card are compared with: prompts, the tokens that are made to follow, and transformers' own rows."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

NUM_FORCED = 6  # tokens that follow each prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the tokens that follow it, whatever the model would have chosen. slot: where it runs."""

    slot: int
    prompt: tuple[int, ...]
    forced: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.forced]


# By (case, index of the forced token that comes next; the prompt's own logits are 0): what computed it, and the row.
Rows = dict[tuple[int, int], tuple[str, torch.Tensor]]


def make_cases(lengths: tuple[int, ...], vocab_size: int) -> list[Case]:
    rng = random.Random(7)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    return [Case(slot, ids(length), ids(NUM_FORCED)) for slot, length in enumerate(lengths)]


@torch.inference_mode()
def reference_rows(
    folder: str, cases: list[Case], dtype: torch.dtype, device: torch.device, weights: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """float32 [forced + 1, vocab_size] of each case, on the host, computed in dtype: float32, or that of the weights,
    which are those of load_format dummy."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    # Eager attention: library kernels may round float32 on the way.
    attention = "eager" if dtype is torch.float32 else "sdpa"
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation=attention)
    model = model.eval()
    if dtype is torch.float32:
        model = model.float()  # the same weights; not for bf16, where it would round the rotary frequencies too
    rows = []
    for case in cases:
        ids = torch.tensor([case.ids], device=device)
        rows.append(model(ids, use_cache=False, logits_to_keep=NUM_FORCED + 1).logits[0].float().cpu())
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows
