"""Compare generated token ids with golden ones, telling float noise from a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NearTie:
    """First difference at index, where the reference's two best logits were as good as equal: float order decides."""

    index: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First difference at index, or the shorter length where one is a prefix of the other. A fault."""

    index: int


def first_difference(
    expected_ids: Sequence[int], margins: Sequence[float], got_ids: Sequence[int], tolerance: float = 1e-4
) -> NearTie | Mismatch | None:
    """None when equal. margins[i]: largest minus second largest logit of the reference at step i.

    What follows a near tie has another history than the reference, so it is not judged: not even its length.
    """
    for index, (expected, margin, got) in enumerate(zip(expected_ids, margins, got_ids, strict=False)):
        if expected != got:
            return NearTie(index) if margin <= tolerance else Mismatch(index)
    if len(expected_ids) != len(got_ids):
        return Mismatch(min(len(expected_ids), len(got_ids)))
    return None
