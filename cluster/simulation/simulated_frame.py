"""What one iteration of a simulated engine tells the routers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.simulation.client import Attempt
from replicas.messages import EngineLoad


@dataclass(slots=True)
class SimulatedFrame:
    """load: if it has changed. first_tokens: of prompts computed here."""

    load: EngineLoad | None = None
    admitted: list[Attempt] = field(default_factory=list)
    first_tokens: list[Attempt] = field(default_factory=list)
    finished: list[Attempt] = field(default_factory=list)
    evicted: list[Attempt] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.load is None and not (self.admitted or self.first_tokens or self.finished or self.evicted)

    def part(self, is_theirs: Callable[[Attempt], bool]) -> SimulatedFrame:
        """What one router acts upon: of its own requests, and no first tokens, which go on to the client."""
        return SimulatedFrame(
            admitted=list(filter(is_theirs, self.admitted)),
            finished=list(filter(is_theirs, self.finished)),
            evicted=list(filter(is_theirs, self.evicted)),
        )
