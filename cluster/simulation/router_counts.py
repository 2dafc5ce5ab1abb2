"""What a simulated router did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class RouterCounts:
    """decision_s: CPU time that decisions took."""

    num_decisions: int = 0
    decision_s: float = 0.0
    num_waited: int = 0  # routes on which the request had to wait for memory or a slot
    num_replays: int = 0  # after an eviction
    # Prompt tokens in prefix caches, by pool: as expected, as found.
    expected_tokens: Counter[str] = field(default_factory=Counter)
    found_tokens: Counter[str] = field(default_factory=Counter)

    def decided(self, decision_s: float) -> None:
        """A decision has taken so long. Mutates."""
        self.decision_s += decision_s
        self.num_decisions += 1

    def found(self, pool: str, num_expected: int, num_found: int) -> None:
        """A prompt has been answered. Mutates."""
        self.expected_tokens[pool] += num_expected
        self.found_tokens[pool] += num_found
