"""What an engine can do with requests."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A request's prompt is computed here or its KV read from another engine; then its tokens are decoded here, or its
    KV is offered to another engine. Any combination will do.
    """

    computes: bool = False
    decodes: bool = False
    offers: bool = False
    reads: bool = False

    @property
    def does_both(self) -> bool:
        """Whether it may generate, and compute prompts for others."""
        return self.decodes and self.offers

    @property
    def num_reserved_slots(self) -> int:
        """Of an engine that does both: kept for prompts that it computes for others."""
        return int(self.does_both)

    def missing(self, request: Request) -> str | None:
        """What a request asks for that is not here, or None."""
        if not (self.computes if request.local_prefill else self.reads):
            return "compute prompts" if request.local_prefill else "read KV"
        if not (self.offers if request.hands_over else self.decodes):
            return "offer KV" if request.hands_over else "decode"
        return None


PREFILL = Capabilities(computes=True, offers=True)
DECODE = Capabilities(computes=True, decodes=True, reads=True)
BOTH = Capabilities(computes=True, decodes=True, offers=True, reads=True)
