"""The rules of token choice of every slot, and the tokens that they look back at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.device_copy import to_device
from replicas.sampling.rules.rule_order import RULES
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.rules.token_rule import RuledRow, TokenRule
from replicas.sampling.sample_place import SamplePlace
from scheduler.plan import SlotInit


class SlotRules:
    """Histories stay on the device, so that a step can be launched before the tokens of the last one are read.

    A slot without rules costs nothing here, and no history is kept for it.
    """

    def __init__(self, num_slots: int, max_len: int, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._history = torch.zeros(num_slots, max_len, dtype=torch.int32, device=self._device)
        self._rules: dict[int, tuple[TokenRule, ...]] = {}  # of slots that have any
        self._with_history: set[int] = set()

    def start(self, init: SlotInit) -> None:
        """A sequence takes a slot. Mutates."""
        rules = tuple(rule for kind in RULES if (rule := kind.asked_by(init, self._device)) is not None)
        self._rules.pop(init.slot, None)
        self._with_history.discard(init.slot)
        if rules:
            self._rules[init.slot] = rules
        if any(rule.reads_history for rule in rules):
            self._with_history.add(init.slot)
            ids = [*init.context.prompt_ids, *([] if init.last_token is None else [init.last_token])]
            self._history[init.slot, : len(ids)] = to_device(torch.tensor(ids, dtype=torch.int32), self._device)

    def apply(self, logits: Tensor, places: Sequence[SamplePlace], masks: TokenMasks | None = None) -> list[int]:
        """Change the rows of logits, float32 [R, V], that have rules or masks; which rows these are. Mutates logits.

        places: one for each row. Guesses are history to the places behind them: mutates it, too, beyond what is known.
        Does not synchronise with the host.
        """
        changed = self._apply_rules(logits, places, masks) if self._rules else []
        if masks is not None:
            masks.forbid(logits)
            changed = sorted({*changed, *masks.rows})
        return changed

    def _apply_rules(self, logits: Tensor, places: Sequence[SamplePlace], masks: TokenMasks | None) -> list[int]:
        self._look_back_at_guesses(places)
        by_kind: defaultdict[type[TokenRule], list[RuledRow[TokenRule]]] = defaultdict(list)
        changed = []
        for index, place in enumerate(places):
            rules = self._rules.get(place.slot, ())
            for rule in rules:
                if masks is not None and rule.yields_to(masks, index):
                    continue
                by_kind[type(rule)].append(RuledRow(index, place.slot, place.position, rule))
            if rules:
                changed.append(index)
        for kind in RULES:
            if kind in by_kind:
                kind.apply(logits, by_kind[kind], self._history)
        return changed

    def _look_back_at_guesses(self, places: Sequence[SamplePlace]) -> None:
        guessed = [
            [p.slot, p.position, p.guess] for p in places if p.guess is not None and p.slot in self._with_history
        ]
        if guessed:
            slot, position, token = to_device(torch.tensor(guessed, dtype=torch.int64).T.contiguous(), self._device)
            self._history[slot, position] = token.int()

    def know(self, slot: int, start: int, ids: NDArray[np.int32]) -> None:
        """A sequence's tokens from position start on, which were chosen elsewhere. Mutates."""
        if slot in self._with_history:
            self._history[slot, start : start + len(ids)] = to_device(torch.from_numpy(ids.copy()), self._device)

    def store(self, places: Sequence[SamplePlace], tokens: Tensor) -> None:
        """Remember the chosen tokens, int64 [R]: they are history to the next step. Mutates."""
        if not self._with_history:
            return
        kept = [[i, p.next_slot, p.position] for i, p in enumerate(places) if p.next_slot in self._with_history]
        if kept:
            row, slot, position = to_device(torch.tensor(kept, dtype=torch.int64).T.contiguous(), self._device)
            self._history[slot, position] = tokens[row].int()
