"""What a rule of token choice is. A new one is a new file beside this and a line in `rule_order`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from replicas.device_copy import to_device
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.plan import SlotInit

RuleT = TypeVar("RuleT", bound="TokenRule")


@dataclass(frozen=True, slots=True)
class RuledRow(Generic[RuleT]):
    """A row of logits that a rule changes. history[slot, :position] is the prompt and the output so far."""

    index: int  # of the row in the logits
    slot: int
    position: int  # of the token to be chosen
    rule: RuleT


class TokenRule(ABC):
    """One rule as one slot has it: its parameters, ready on the logits' device.

    A rule is a function of logits, history and parameters: it keeps nothing from step to step.
    """

    reads_history: ClassVar[bool]  # whether `apply` looks at the slot's history: only then is it kept

    @classmethod
    @abstractmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        """The rule of a sequence that takes a slot, or None when its parameters leave the logits alone."""

    def yields_to(self, masks: TokenMasks, row: int) -> bool:
        """Whether it does not count for this row of logits, as its mask leaves nothing else to choose."""
        return False

    @classmethod
    @abstractmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        """Change these rows of logits, float32 [R, V]. Mutates logits only; does not synchronise with the host.

        history: int32 [num_slots, max_len]. Beyond a row's position it holds anything.
        """


@dataclass(frozen=True, slots=True)
class PastTokens:
    """Tokens of several rows side by side.

    rows: int64 [n, 1], into the logits. ids: int64 [n, length]. is_counted: bool [n, length]; where it is false, ids
    holds the row's very first token instead: some id of the row, so that a gather and a scatter may take it along.
    """

    rows: Tensor
    ids: Tensor
    is_counted: Tensor

    @staticmethod
    def of(rows: Sequence[RuledRow[RuleT]], starts: Sequence[int], history: Tensor) -> PastTokens:
        """Tokens [start, position) of each row. Mutates nothing."""
        places = [[row.index, row.slot, start, row.position] for row, start in zip(rows, starts, strict=True)]
        index, slot, start, end = to_device(torch.tensor(places, dtype=torch.int64).T.contiguous(), history.device)
        first, last = min(starts), max(row.position for row in rows)
        at = torch.arange(first, last, device=history.device)
        is_counted = (at >= start[:, None]) & (at < end[:, None])
        ids = torch.where(is_counted, history[slot, first:last], history[slot, :1]).long()
        return PastTokens(index[:, None], ids, is_counted)


def column(values: Sequence[float], device: torch.device) -> Tensor:
    """One value for each row: float32 [n, 1] on the device."""
    return to_device(torch.tensor(values, dtype=torch.float32)[:, None], device)
