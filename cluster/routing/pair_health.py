"""What it counts that handoffs of a pair have failed lately: a penalty in seconds, halved again and again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_FAILURE_S = 10.0  # added by each failure: one costs a request as much, or more
_MOST_S = 60.0
_HALF_LIFE_S = 10.0  # so that a prompt goes there again some minute or two later


@dataclass(frozen=True, slots=True)
class PairHealth:
    """penalty_s: as of at_s (monotonic). is_on_trial: it has failed, and not worked since: one prompt at a time."""

    penalty_s: float = 0.0
    at_s: float = 0.0
    is_on_trial: bool = False

    def failed(self, now_s: float) -> PairHealth:
        """After a handoff that came to nothing."""
        return PairHealth(min(_MOST_S, self._left_s(now_s) + _FAILURE_S), now_s, is_on_trial=True)

    def worked(self, now_s: float) -> PairHealth:
        """After one that did: a pair that works at times is not well yet."""
        return PairHealth(self._left_s(now_s) / 2, now_s)

    def cost_s(self, now_s: float, is_in_use: bool) -> float:
        """What a prompt counts more there. is_in_use: another's handoff is under way, which will tell."""
        if self.is_on_trial and is_in_use:
            return _MOST_S
        return self._left_s(now_s)

    def _left_s(self, now_s: float) -> float:
        if not self.penalty_s:
            return 0.0
        left_s = self.penalty_s * 0.5 ** ((now_s - self.at_s) / _HALF_LIFE_S)
        return left_s if left_s >= 0.001 else 0.0
