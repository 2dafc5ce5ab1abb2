"""How a client's prediction of its answer turned out: for its usage."""

from __future__ import annotations


class DraftFinding:
    """Of one prompt, over all attempts at it and all its choices. num_accepted: tokens of the answer that had been
    drafted; num_rejected: drafts that turned out otherwise.
    """

    def __init__(self) -> None:
        self._of_attempt: dict[str, tuple[int, int]] = {}

    @property
    def num_accepted(self) -> int:
        return sum(accepted for _, accepted in self._of_attempt.values())

    @property
    def num_rejected(self) -> int:
        return sum(drafted - accepted for drafted, accepted in self._of_attempt.values())

    def tell(self, attempt_id: str, num_drafted: int, num_accepted: int) -> None:
        """An attempt has had so many drafts so far, of which so many held. Mutates."""
        self._of_attempt[attempt_id] = num_drafted, min(num_accepted, num_drafted)
