"""Which rows of a step have drafts, and how many: what a speculator chooses, as far as there is room for it.

Drafts are never worth what others lose by them. So they take free blocks that no row of the step needs, no more of the
step than prompts can spare, and only so many that the projected use stays within its limit if all of them count: a
request is then further than was projected, and holds its blocks earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.draft_counts import DraftCounts
from scheduler.plan import Accepted, StepPlan
from scheduler.request import Request
from scheduler.request import Sequence as Choice
from scheduler.sampling_params import SamplingParams
from scheduler.speculation import RowSpeculation, SpeculationState


class ChoosesDrafts(Protocol):
    """Chooses, and learns from what comes of it: `scheduler.speculator` does."""

    @property
    def num_rests(self) -> int:
        """Times that a row was switched off."""

    def choose(
        self, rows: Sequence[RowSpeculation], num_context_tokens: int, most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Drafts of each row of the next step, at most its `most`. num_context_tokens: that its rows attend to.
        most_tokens: of the step. Mutates."""

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        """A row that was to have num_planned drafts had num_drafted, of which the first num_accepted held. Mutates."""

    def step_took(self, num_drafts: int, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """A step without prompts. num_drafts: the most that a row of it had; num_tokens: that it computed. Mutates."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """max_drafts: of a row. can_draft: whether the runner makes any for rows with such parameters. is_padded: whether a
    step computes all drafts that were planned, there or not. takes_forced: whether rows with grammars may have as
    drafts what these force, and nothing else.
    """

    speculator: ChoosesDrafts
    max_drafts: int
    can_draft: Callable[[SamplingParams], bool]
    is_padded: bool = False
    takes_forced: bool = False


class DraftRoom(NamedTuple):
    """What a step leaves to drafts. num_blocks: free ones. num_ahead: blocks by which the projected use may rise."""

    num_tokens: int
    num_blocks: int
    num_ahead: int


class DraftPlanner:
    """Of one engine."""

    def __init__(self, speculation: Speculation, block_size: int, lag: int) -> None:
        self._speculation, self._block_size, self._lag = speculation, block_size, lag
        self.counts = DraftCounts()  # for metrics; any thread may look

    @property
    def max_drafts(self) -> int:
        """Of a row."""
        return self._speculation.max_drafts

    def may_draft(self, request: Request) -> bool:
        """Whether its rows may have any. Not where a row waits for the tokens in front of it; with a grammar only those
        that it forces: what it allows behind others is only known with them."""
        if request.needs_known_tokens:
            return False
        if request.spec.grammar is not None:
            return self._speculation.takes_forced
        return self._speculation.can_draft(request.spec.sampling)

    def plan(self, rows: Sequence[tuple[Request, Choice]], room: DraftRoom) -> Sequence[int]:
        """Drafts of each row, all of which have room for their own token. Mutates what the speculator has learned."""
        asking = [self._row(request, choice) for request, choice in rows]
        if not any(row.most for row in asking):
            return [0] * len(rows)
        num_context_tokens = sum([row.position + 1 for row in asking])
        wanted = self._speculation.speculator.choose(asking, num_context_tokens, len(rows) + room.num_tokens)
        counts = []
        for (_, choice), row, count in zip(rows, asking, wanted, strict=True):
            if count:
                count, room = self._within(room, row.position, len(choice.block_ids), min(count, row.most))
            counts.append(count)
        self.counts.add_step(max(counts), self._speculation.speculator.num_rests)
        return counts

    def settled(self, request: Request, accepted: Accepted) -> None:
        """What came of a row that was planned with drafts. Mutates counts, and what the speculator has learned."""
        if not request.may_draft:
            return
        num_planned, num_held = accepted.num_sampled - 1, accepted.num_accepted - 1
        # A drafter that has failed finds nothing for anybody.
        request.gave_up_drafts = not accepted.num_drafted and not self.may_draft(request)
        self.counts.add(accepted.num_drafted, num_held)
        request.speculation.num_drafted += accepted.num_drafted
        request.speculation.num_accepted += num_held
        self._speculation.speculator.accepted(request.speculation, num_planned, accepted.num_drafted, num_held)

    def step_took(self, plan: StepPlan, accepted: Sequence[Accepted], seconds: float) -> None:
        """A step has run, with these rows that had room for drafts. Mutates what the speculator has learned."""
        if plan.num_prefill_tokens or plan.is_empty or plan.swap_outs or plan.swap_ins:
            return
        is_padded = self._speculation.is_padded
        counts = [one.num_sampled - 1 if is_padded else one.num_drafted for one in accepted]
        num_context_tokens = sum([row.start + 1 for row in plan.slices])
        num_tokens = len(plan.slices) + sum(counts)
        self._speculation.speculator.step_took(max(counts, default=0), num_tokens, num_context_tokens, seconds)

    def _row(self, request: Request, choice: Choice) -> RowSpeculation:
        # Behind the row's own token, and those of the rows that are planned before it is known how many drafts count:
        # as if all did, or the sequence would sit out steps at what may be its end.
        num_left = request.spec.max_tokens - choice.num_planned - 1 - self._lag
        is_drafting = request.may_draft and not request.gave_up_drafts
        most = max(0, min(self._speculation.max_drafts, num_left)) if is_drafting else 0
        return RowSpeculation(request.speculation, request.prompt_len + choice.num_planned - 1, most)

    def _within(self, room: DraftRoom, position: int, num_held: int, count: int) -> tuple[int, DraftRoom]:
        """At most `count` drafts behind a token at `position`, and what they leave. num_held: blocks of the sequence,
        as far as it has them; the token's own is there."""
        size = self._block_size
        num_there = max(num_held, position // size + 1)
        count = min(count, room.num_tokens, (num_there + room.num_blocks) * size - 1 - position, room.num_ahead * size)
        num_new = max(0, (position + count) // size + 1 - num_there)
        num_ahead = -(-count // size)  # it needs each block so many tokens sooner
        return count, DraftRoom(room.num_tokens - count, room.num_blocks - num_new, room.num_ahead - num_ahead)
