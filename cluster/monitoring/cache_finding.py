"""How much of a client's prompt was found in prefix caches: for its usage, the log and the metrics."""

from __future__ import annotations


class CacheFinding:
    """Of one prompt, over all attempts at it. What the first attempt that told found counts: a later one finds what the
    client's own request had computed before it failed.

    num_tokens: of the prompt, that nobody had to compute: what the engine found that computed the others. is_local:
    whether decode did; None until somebody has told.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.is_local: bool | None = None
        self._attempt_id = ""

    def tell(self, attempt_id: str, num_tokens: int, is_local: bool) -> None:
        """An attempt has found so many tokens; of what it says the most counts. Mutates."""
        if self.is_local is None:
            self.is_local, self._attempt_id = is_local, attempt_id
        if attempt_id == self._attempt_id:
            self.num_tokens = max(self.num_tokens, num_tokens)
