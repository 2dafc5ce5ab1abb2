"""Requests that may be why replicas died: one at a time, so that it shows which of them it is.

A request that kills whoever computes it takes its neighbours with it, is tried again beside some of them, and takes
these with it again: by counting alone it is not told from them. So those that were there each time are let in one by
one, beside requests that were not. Who gets past its first row is none (one that was killed where it computed a prompt,
or a first row, computes that first), and the next one is let in. If the engine dies meanwhile, there is only one that
was in it. Of several routers' suspects too: that is why it is decided here and not there.
"""

from __future__ import annotations

from scheduler.request import Request


class Suspects:
    """One for each scheduler."""

    def __init__(self) -> None:
        self._tried: Request | None = None  # let in last

    def let_in(self, request: Request) -> None:
        """It is admitted. Mutates, if it is one."""
        if request.is_suspect:
            assert not self.must_wait(request), f"{request.request_id} beside another suspect"
            self._tried = request

    def must_wait(self, request: Request) -> bool:
        """Whether one of them is still being tried: then the next, which this is, waits."""
        tried = self._tried
        return tried is not None and not tried.is_over and not _is_cleared(tried)


def _is_cleared(request: Request) -> bool:
    """Whether some choice has a token from a row: one more than the prompt gives. A beam search shows none on its way:
    its beams have planned tokens that are known."""
    return any(sequence.num_known > 1 for sequence in request.sequences)
