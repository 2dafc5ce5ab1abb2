"""What transformers alone makes of some prompts, each by itself, before anything of ours touches the model.

Kept for the check of what is served (`self_check`), which computes the same prompts beside each other.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from replicas.layers.quantised_linear import QuantisedLinear, whole_inputs
from replicas.model.rounding_cache import KvRounding
from replicas.quantisation.scheme import Activations

# (prompt tokens, tokens fed after them, whether the prompt comes in two chunks, the step it joins in): of unlike
# lengths, over more than one block, decoding over a block's end (of 16) while others are still prompts.
_PROMPTS = ((30, 3, True, 0), (4, 3, False, 0), (11, 2, True, 1))
# A prompt that reaches beyond the trained length may cost this many operations; a longer one is left to the probe of
# positions. On a card a quarter of a second, on a CPU thread less.
_MOST_OPERATIONS = {"cpu": 5e9, "cuda": 1e14}
_BEYOND = 2
_LONGEST_CHUNK = 512


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """token_ids: a prompt and what is fed after it, token by token. chunk_ends: ascending; the last ends the prompt.

    first_step: how many steps after the others it joins. logits: float32 on the host [num_fed + 1, vocab_size], of
    the prompt's last token and of each that is fed. moved: float32 [num_fed + 1], how far each position's logits are
    from those of the same weights with inputs that are not rounded; None where none are.
    """

    token_ids: tuple[int, ...]
    chunk_ends: tuple[int, ...]
    first_step: int
    logits: torch.Tensor
    moved: torch.Tensor | None = None

    @property
    def prompt_len(self) -> int:
        return self.chunk_ends[-1]


@torch.inference_mode()
def compute_reference(
    model: Any, max_model_len: int, original_len: int | None, rounding: KvRounding | None = None
) -> tuple[CheckedPrompt, ...]:
    """Run each prompt through the untouched model. Blocks for about half the time that the whole check takes.

    original_len: positions that the model was first trained on, where its configuration tells: what it does beyond
    them it may do in another way, so a prompt that just exceeds them is among the prompts, unless it costs too much.
    rounding: of keys and values before attention; mutated.
    """
    shapes = list(_PROMPTS)
    if original_len is not None and original_len < max_model_len and _is_affordable(model, original_len):
        shapes.append((original_len + _BEYOND, 2, True, 1))
    return tuple(
        _checked(model, number, *_fitted(num_prompt, num_fed, max_model_len), is_cut, first_step, rounding)
        for number, (num_prompt, num_fed, is_cut, first_step) in enumerate(shapes)
    )


def _is_affordable(model: Any, original_len: int) -> bool:
    num_parameters = sum(int(parameter.numel()) for parameter in model.parameters())
    return 2 * num_parameters * (original_len + _BEYOND) <= _MOST_OPERATIONS.get(str(model.device.type), 0.0)


def _fitted(num_prompt: int, num_fed: int, max_model_len: int) -> tuple[int, int]:
    """No longer than requests may be."""
    length = min(num_prompt + num_fed, max_model_len)
    num_fed = min(num_fed, length - 1)
    return length - num_fed, num_fed


def _checked(
    model: Any, number: int, num_prompt: int, num_fed: int, is_cut: bool, first_step: int, rounding: KvRounding | None
) -> CheckedPrompt:
    vocab_size = model.config.get_text_config().vocab_size
    ids = tuple((7919 * (i + 1) + 104_729 * number) % vocab_size for i in range(num_prompt + num_fed))
    logits, moved = _logits(model, ids, num_fed + 1, rounding), None
    if _rounds_inputs(model):
        again = KvRounding(rounding.scales) if rounding is not None else None
        with whole_inputs(model):
            moved = (_logits(model, ids, num_fed + 1, again) - logits).abs().amax(1)
    return CheckedPrompt(ids, _chunk_ends(num_prompt, is_cut), first_step, logits, moved)


def _rounds_inputs(model: Any) -> bool:
    layers = (module for module in model.modules() if isinstance(module, QuantisedLinear))
    return any(layer.scheme.activations is not Activations.NONE for layer in layers)


def _logits(model: Any, ids: tuple[int, ...], num_last: int, rounding: KvRounding | None) -> torch.Tensor:
    """float32 on the host [num_last, vocab_size]."""
    cache: dict[str, Any] = {"use_cache": False}
    if rounding is not None:
        # A model's own code may have the older name still.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache = {"use_cache": True, name: rounding.new_cache(model.config.get_text_config())}
    output = model(input_ids=torch.tensor([ids], device=model.device), logits_to_keep=num_last, **cache)
    logits: torch.Tensor = output.logits[0].float().cpu()
    return logits


def _chunk_ends(num_prompt: int, is_cut: bool) -> tuple[int, ...]:
    """Ends of a prompt's chunks: unlike lengths that end within blocks."""
    first = min(num_prompt * 3 // 7, _LONGEST_CHUNK) if is_cut else 0
    return (*(end for end in range(first, num_prompt, _LONGEST_CHUNK) if end), num_prompt)
