"""Local systems whose decode engines draft, as many tokens as a test says, right as often as it says."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replicas.serving.engine_builder import BuiltEngine
from replicas.settings import EngineSettings, SpeculationSettings
from replicas.speculation.drafter import NO_DRAFT, Drafter, DraftRow
from replicas.speculation.drafting_runner import DraftingRunner
from scheduler.constant_drafts import ConstantDrafts
from scheduler.plan import SlotInit
from scheduler.speculation import SpeculationState
from tests.engines.local_system import Generated

# By prompt, seed and choice: a whole text.
Texts = Mapping[tuple[tuple[int, ...], int, int], Sequence[int]]


def drafting(settings: EngineSettings, max_drafts: int = 7) -> EngineSettings:
    return replace(settings, speculative=SpeculationSettings("ngram", max_drafts=max_drafts))


class CountedDrafts(ConstantDrafts):
    """num_drafted, num_held: since the test looked last."""

    num_drafted = num_held = 0

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        CountedDrafts.num_drafted += num_drafted
        CountedDrafts.num_held += num_accepted

    @staticmethod
    def take() -> tuple[int, int]:
        """Drafted and held. Mutates."""
        counts = CountedDrafts.num_drafted, CountedDrafts.num_held
        CountedDrafts.num_drafted = CountedDrafts.num_held = 0
        return counts


class OracleDrafter:
    """Drafts what the plain engine has said before, each token right with a probability."""

    def __init__(self, texts: Texts, right: float) -> None:
        self._texts, self._right = texts, right
        self._of_slot: dict[int, tuple[Sequence[int], int]] = {}  # its text, and how much of it is known

    def start(self, init: SlotInit) -> None:
        context = init.context
        prompt = context.prompt_ids[: context.output_start]
        text = self._texts.get((prompt, init.sampling.seed, init.choice), ())
        num_known = len(context.prompt_ids) - context.output_start + (init.last_token is not None)
        self._of_slot[init.slot] = text, num_known

    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        drafts = torch.full((len(rows), max(row.num_drafts for row in rows)), NO_DRAFT)
        for index, row in enumerate(rows):
            text, first = self._of_slot[row.slot]
            for place, token_id in enumerate(text[first : first + row.num_drafts]):
                is_right = hash((row.choice, first + place, len(text), token_id)) % 1000 < 1000 * self._right
                drafts[index, place] = token_id if is_right else (token_id + 1) % 300
        return drafts

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        for slot, ids, count in zip(slots, tokens.tolist(), counts.tolist(), strict=True):
            text, num_known = self._of_slot[slot]
            if text:
                got, right = ids[:count], list(text[num_known : num_known + count])
                assert got[: len(right)] == right, "another text than without drafts"
            self._of_slot[slot] = text, num_known + count


class FailingDrafter:
    """Fails at a call of one of its methods, after so many that went well."""

    def __init__(self, method: str, num_before: int) -> None:
        self._method, self._left = method, num_before

    def _called(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("a drafter's own bug")

    def start(self, init: SlotInit) -> None:
        self._called("start")

    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        self._called("draft")
        return torch.full((len(rows), 1), 7)

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        self._called("accepted")


class SameDrafter:
    """Drafts the same tokens for every row, or for so many rows, whatever was asked."""

    def __init__(self, token_ids: Sequence[int], num_rows: int | None = None) -> None:
        self._token_ids, self._num_rows = token_ids, num_rows
        self.num_asked = 0

    def start(self, init: SlotInit) -> None:
        """It knows enough."""

    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        self.num_asked += 1
        return torch.tensor([self._token_ids] * (len(rows) if self._num_rows is None else self._num_rows))

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """It knows enough."""


class HangingDrafter(SameDrafter):
    """Does not come back from one call, until `wakes` is set."""

    def __init__(self, token_ids: Sequence[int], num_before: int) -> None:
        super().__init__(token_ids)
        self._left = num_before
        self.wakes = threading.Event()

    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self.wakes.wait()
        return super().draft(rows)


def draft_with(built: BuiltEngine, num_drafts: int, drafter: Drafter | None = None) -> None:
    """While it is idle: from now on so many in every row. drafter: None: its own."""
    runner, planner = built.engine.runner, built.engine.scheduler.drafts
    assert isinstance(runner, DraftingRunner)
    assert planner is not None
    planner._speculation = replace(planner._speculation, speculator=CountedDrafts(num_drafts))
    own = getattr(runner, "own_drafter", None) or runner._drafter
    runner.own_drafter = own  # type: ignore[attr-defined]
    runner._drafter = drafter or own


def assert_same(generated: list[Generated], expected: list[Generated]) -> None:
    """Tokens and reasons, and log-probabilities up to the order of sums."""
    for got, right in zip(generated, expected, strict=True):
        assert (got.token_ids, got.finish_reasons) == (right.token_ids, right.finish_reasons)
        for choice, logprobs in right.logprobs.items():
            for ours, theirs in zip(got.logprobs[choice], logprobs, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                    assert [id_ for id_, _ in ours.top] == [id_ for id_, _ in theirs.top]
        assert len(got.prompts) == len(right.prompts)
