"""A scheme of quantisation: what weights and activations of linear layers are rounded to, and how a file stores them.

A scheme defines the product: the same numbers are multiplied whatever the batch, so that a text does not depend on its
neighbours. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class WeightKind(StrEnum):
    """What a weight is rounded to."""

    FP8 = "fp8"  # e4m3, without infinities
    INT8 = "int8"
    INT4 = "int4"


class Granularity(StrEnum):
    """Which weights share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"  # of one output
    GROUP = "group"  # of one output and some inputs
    BLOCK = "block"  # of some outputs and some inputs


class Activations(StrEnum):
    """What the inputs of a product are rounded to; of the weights' kind, if to anything."""

    NONE = "none"
    TOKEN = "token"  # by the largest number of each token
    TOKEN_GROUP = "tokengroup"  # by the largest number of each token in each group of inputs
    STATIC = "static"  # by a scale in the checkpoint


class Dialect(StrEnum):
    """Who stores it: which tensors a linear layer has in a file, and what is where in them."""

    COMPRESSED_TENSORS = "compressed-tensors"
    FP8 = "fp8"
    AWQ = "awq"
    GPTQ = "gptq"  # zero points are stored less one
    GPTQ_V2 = "gptq_v2"
    MADE_HERE = "made at load"  # of a checkpoint that is not quantised


@dataclass(frozen=True, slots=True)
class Targets:
    """Which linear layers are quantised: those that a pattern of `wanted` matches, and none of `alone`.

    Patterns are regular expressions of whole module names. has_head: whether the output head is one like the others.
    """

    wanted: tuple[str, ...] = (".*",)
    alone: tuple[str, ...] = ()
    has_head: bool = False

    def has(self, name: str, is_head: bool = False) -> bool:
        if is_head and not self.has_head:
            return False
        return _matches(self.wanted, name) and not _matches(self.alone, name)


@dataclass(frozen=True, slots=True)
class Scheme:
    """group_size: inputs that share a scale; None: all of them. block_rows: outputs that share one, of BLOCK.

    is_symmetric: without zero points. is_ordered: groups are of inputs in an order that the file says. has_kv_scales:
    whether the file says by what keys and values are divided where they are stored in 8 bits. rotation: so many inputs
    at a time are rotated by a Hadamard matrix before they are rounded, and weights likewise; 0: they are not.
    """

    kind: WeightKind
    granularity: Granularity
    activations: Activations
    dialect: Dialect
    group_size: int | None = None
    block_rows: int = 1
    is_symmetric: bool = True
    is_ordered: bool = False
    targets: Targets = Targets()
    has_kv_scales: bool = False
    rotation: int = 0

    def describe(self) -> str:
        """In a word, for people and in what replicas must have in common."""
        size = ""
        if self.granularity is Granularity.BLOCK:
            size = f"{self.block_rows}x{self.group_size}"
        elif self.granularity is Granularity.GROUP:
            size = f"{self.group_size}"
        activations = "" if self.activations is Activations.NONE else f"-{self.activations}"
        rotation = f"-rotated{self.rotation}" if self.rotation else ""
        return f"{self.kind}-{self.granularity}{size}{activations}{rotation}"


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)
