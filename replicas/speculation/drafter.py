"""What makes drafts: tokens that a sequence may go on with, which the step that computes them proves right or wrong.

A draft counts if and only if the model itself chooses that token there. So whatever a drafter does, texts stay as they
are: it costs time when it is wrong, never words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from scheduler.plan import SlotInit

NO_DRAFT = -1


class DraftRow(NamedTuple):
    """A row that may have drafts behind its slot's last token: at most num_drafts, and at least 1. position: of that
    token, at most, where it is the device that knows it."""

    slot: int
    choice: int
    num_drafts: int
    position: int = 0


class Drafter(Protocol):
    """Used by the runner, on the threads that launch its steps: one, or one of each lane, for other slots each. Tensors
    are on the device of the model's logits. An exception costs drafts, not text: the runner logs it, and asks this
    drafter no more.
    """

    def start(self, init: SlotInit) -> None:
        """A sequence that may have drafts takes a slot: what is known of it is init.context.prompt_ids, which may end
        with output, and init.last_token behind them, if that is not None. Called before anything else of its step. When
        it ends nobody says; another one takes its slot. Mutates."""

    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        """int64 [len(rows), k], k at most the largest num_drafts: of each row what may follow, NO_DRAFT from where
        nothing is expected. Must not depend on how often it is asked: a step that fails is run again.
        """

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """A step's tokens that count, of every slot that was started and got any, with drafts or without: the first
        counts[i], at least one, of tokens[i]. int64 [len(slots), n] and [len(slots)]. Mutates. On a card nothing may
        wait for the device.
        """


@runtime_checkable
class ExpectingDrafter(Drafter, Protocol):
    """One that reads prompts itself, and may do so before their sequences are here."""

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A sequence with this prompt will take a slot when its KV is here. Not for slots of other lanes' threads.
        Mutates."""

    def read_ahead(self) -> bool:
        """Read a part of the prompts that are expected; false if nothing is left of them. Blocks. Mutates."""
