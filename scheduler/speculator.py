"""What an engine learns of its drafts while it runs, and how many it makes in the next step."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.draft_acceptance import DRAFT_COUNTS, DraftAcceptance
from scheduler.speculation import (
    LONG_AGO,
    DraftChoice,
    RowSpeculation,
    SpeculationPolicy,
    SpeculationState,
    StepOutlook,
)
from scheduler.step_times import StepTimes

_MEMORY = 256.0  # drafts
_MOST_CREDIT_STEPS = float(DRAFT_COUNTS[0])  # the fewest drafts bring no more, so a probe that costs more is none
_MOST_AGE = 512  # steps after which one without drafts is taken, to be timed: what drafts cost is known by its time


class Speculator:
    """What an engine has learned of its drafts, and what it makes of that. One thread. num_rests: times that a row was
    switched off.

    A batcher asks `choose` for each step's rows, and says what came of each by `accepted`; whoever runs the steps says
    by `step_took` how long they took. Until a step without drafts has been timed, none has any.
    """

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy = policy
        self.times = StepTimes()
        # Of rows that have drafted nothing yet: as if half of first drafts held, until it is known better.
        self.acceptance = DraftAcceptance(_MEMORY, 4.0, 8.0, 5.6, 8.0)
        self.forced_acceptance = DraftAcceptance(_MEMORY, 8.0, 8.0, 8.0, 8.0)  # of what grammars force: all holds
        self.num_rests = 0
        self._last = 0
        self._credit_s = 0.0
        self._num_with_drafts = 0  # steps, since the last one without

    def choose(
        self, rows: Sequence[RowSpeculation], num_context_tokens: int, most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Drafts of each row of the next step, at most its `most`. num_context_tokens: that its rows attend to.
        most_tokens: of the step. Mutates: who drafts, and who rests."""
        none = (0,) * len(rows)
        if not rows or not self.policy.may_draft(len(rows)):
            return none
        plain_s = self.times.seconds(0, len(rows), num_context_tokens)
        # With a lag it was taken already, perhaps, and is not timed yet.
        plain_age = min(self.times.age(len(rows)), self._num_with_drafts)
        if plain_s is None or plain_age > _MOST_AGE:
            self._num_with_drafts = 0
            return none

        def seconds(num_drafts: int, num_tokens: int, /) -> float:
            found = self.times.seconds(num_drafts, num_tokens, num_context_tokens)
            assert found is not None, "a step without drafts was timed"
            return found

        share = self.policy.probe_share
        self._credit_s = min(self._credit_s + share * plain_s, _MOST_CREDIT_STEPS * plain_s)
        # Not more at once than the next number that is not timed yet: the first times are guesses.
        most = next((count for count in DRAFT_COUNTS if not self.times.has(count)), DRAFT_COUNTS[-1])
        priors = self.acceptance.gains(), self.forced_acceptance.gains()
        outlook = StepOutlook(
            rows, seconds, priors[0], self._last, self._credit_s, most, most_tokens, priors[1], plain_age
        )
        choice = self.policy.choose(outlook)
        self._take(rows, choice)
        return choice.num_drafts

    def _take(self, rows: Sequence[RowSpeculation], choice: DraftChoice) -> None:
        self._credit_s -= choice.probe_s
        self._last = choice.paying
        self._num_with_drafts = self._num_with_drafts + 1 if choice.step_drafts else 0
        for index in choice.resting:
            rows[index].state.rests_until = rows[index].position + choice.rest_tokens
        self.num_rests += len(choice.resting)
        if choice.step_drafts:
            for row, count in zip(rows, choice.num_drafts, strict=True):
                if count:
                    row.state.tried_at = row.position

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        """A row that was to have num_planned drafts had num_drafted, of which the first num_accepted held. Mutates.

        That none was found costs nothing where steps are not padded: then it says nothing against drafting.
        """
        if not num_drafted and not self.policy.is_padded:
            return
        # Where it costs as much as drafts that are wrong, it is one.
        num_drafted = max(1, num_drafted)
        prior = self.forced_acceptance if state.is_forced else self.acceptance
        prior.learn(num_drafted, num_accepted)
        state.acceptance.learn(num_drafted, num_accepted)
        if num_accepted:
            state.rests_until = LONG_AGO
        state.first, state.gains = state.acceptance.first(prior), state.acceptance.gains(prior)

    def step_took(self, num_drafts: int, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """A step without prompts. num_drafts: the most that a row of it had; num_tokens: that it computed, of all rows
        and of what was drafted behind them. Mutates."""
        num_drafts = next((count for count in (0, *DRAFT_COUNTS) if count >= num_drafts), num_drafts)
        self.times.count(num_drafts, num_tokens, num_context_tokens, seconds)
