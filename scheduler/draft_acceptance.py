"""How many drafted tokens hold, learned from those that were drafted: the older they are, the less they count."""

from __future__ import annotations

from dataclasses import dataclass

# Drafts of a row in one step, where there are any: few sizes, as a card has a graph for each, and each has step times
# of its own to be learned.
DRAFT_COUNTS = (2, 4, 7)


@dataclass(slots=True)
class DraftAcceptance:
    """Two probabilities: that the first draft of a row holds, and that one holds behind another that does.

    Two, as n-grams are found or not, and what is found often goes on for long: one probability for every position would
    make both of them middling. memory: after so many more trials one counts for a third (1/e).
    """

    memory: float
    first_hits: float = 0.0
    first_trials: float = 0.0
    further_hits: float = 0.0
    further_trials: float = 0.0

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Of a row's drafts so many held: the first ones. num_drafted >= 1. Mutates."""
        kept = 1.0 - 1.0 / self.memory
        self.first_hits = self.first_hits * kept + (num_accepted > 0)
        self.first_trials = self.first_trials * kept + 1.0
        num_trials = min(num_accepted, num_drafted - 1)  # behind one that held
        if num_trials > 0:
            kept **= num_trials
            self.further_hits = self.further_hits * kept + num_accepted - 1
            self.further_trials = self.further_trials * kept + num_trials

    def first(self, prior: DraftAcceptance | None = None, weight: float = 6.0) -> float:
        """The probability that the first one holds. prior: what counts like `weight` trials of its own."""
        if prior is None:
            return self.first_hits / self.first_trials
        return (self.first_hits + weight * prior.first()) / (self.first_trials + weight)

    def further(self, prior: DraftAcceptance | None = None, weight: float = 6.0) -> float:
        """The probability that one holds behind another that does."""
        if prior is None:
            return self.further_hits / self.further_trials
        return (self.further_hits + weight * prior.further()) / (self.further_trials + weight)

    def gains(self, prior: DraftAcceptance | None = None) -> tuple[float, ...]:
        """How many drafts hold, on average, with each of DRAFT_COUNTS of them."""
        first, further = self.first(prior), self.further(prior)
        return tuple([expected_accepted(first, further, count) for count in DRAFT_COUNTS])


def expected_accepted(first: float, further: float, num_drafts: int) -> float:
    """How many of so many drafts hold, on average."""
    if further >= 1.0:
        return first * num_drafts
    return first * (1.0 - further**num_drafts) / (1.0 - further)
