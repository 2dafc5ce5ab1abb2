"""What an engine's drafts came to so far, in numbers for metrics."""

from __future__ import annotations

from scheduler.draft_acceptance import DRAFT_COUNTS

MOST_DRAFTS = DRAFT_COUNTS[-1]


class DraftCounts:
    """drafted[i], accepted[i]: drafts at the i-th place behind a row's last token, and those that held. steps: steps
    whose drafts were chosen, by the most that a row was to have. num_rests: times that a row was switched off.

    One thread writes, others read.
    """

    def __init__(self) -> None:
        self.drafted, self.accepted = [0] * MOST_DRAFTS, [0] * MOST_DRAFTS
        self.steps = dict.fromkeys((0, *DRAFT_COUNTS), 0)
        self.num_rests = 0

    def add_step(self, num_drafts: int, num_rests: int) -> None:
        """Was planned with so many, and rows were switched off so often by then. Mutates."""
        self.steps[next((count for count in self.steps if count >= num_drafts), MOST_DRAFTS)] += 1
        self.num_rests = num_rests

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Of one row. Mutates."""
        for place in range(num_drafted):
            self.drafted[place] += 1
        for place in range(num_accepted):
            self.accepted[place] += 1
