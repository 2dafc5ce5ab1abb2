"""Weights that make any language model walk: which token follows is known, what a step costs stays as it is.

Layers add next to nothing to what a token's embedding is, and the head holds each embedding against those of the two
tokens that may come before it. So a text is a walk through the vocabulary: below `START_OF_NEW` in circles of PERIOD
tokens, which n-grams find, above it through everything once, where nothing is to be found. Greedy it hardly ever takes
another step than the next one; at temperature 1 one in five is AHEAD tokens further.
"""

from __future__ import annotations

import math

import torch
from torch import nn

PERIOD, AHEAD = 50, 7
_LOGIT, _PART_AHEAD = 26.0, 0.2


def start_of_new(vocab_size: int) -> int:
    """The first token that lies in no circle."""
    return vocab_size // 2 // PERIOD * PERIOD


def followers(vocab_size: int, ahead: int) -> torch.Tensor:
    """Of each token, the one so many behind it: int64 [vocab_size]."""
    first = start_of_new(vocab_size)
    circles = torch.arange(first)
    order = first + torch.randperm(vocab_size - first, generator=torch.Generator().manual_seed(11))
    behind = torch.empty(vocab_size, dtype=torch.int64)
    behind[:first] = circles // PERIOD * PERIOD + (circles + ahead) % PERIOD
    behind[order] = order.roll(-ahead)
    return behind


@torch.inference_mode()
def make_walk(model: nn.Module, vocab_size: int) -> None:
    """Whatever the model's engine, as long as its modules are called as transformers calls them. Mutates."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        if name.endswith(("o_proj", "down_proj")):
            weight.data.normal_(std=1e-5)
        elif name.endswith("norm"):
            weight.data.fill_(1.0)
    (embedding,) = [module for name, module in modules.items() if name.endswith("embed_tokens")]
    (head,) = [module for name, module in modules.items() if name.endswith("lm_head")]
    given, wanted = embedding.weight.data, head.weight.data
    given.normal_(generator=torch.Generator(given.device).manual_seed(5))
    wanted.zero_()
    dim = given.shape[1]
    for ahead, logit in ((1, _LOGIT), (AHEAD, _LOGIT + math.log(_PART_AHEAD / (1.0 - _PART_AHEAD)))):
        behind = followers(vocab_size, ahead).to(given.device)
        for some in torch.arange(vocab_size, device=given.device).split(8192):
            wanted[behind[some]] += (given[some].float() * (logit / dim)).to(wanted.dtype)


def walk(vocab_size: int, first: int, length: int) -> list[int]:
    """A text that begins with this token."""
    behind = followers(vocab_size, 1).tolist()
    text = [first]
    while len(text) < length:
        text.append(behind[text[-1]])
    return text
