"""One line of steps: numbered one after another, and committed in that order.

An engine has one, in which prompts and rows share steps, or two that run side by side: prompts in one, rows in the
other. Between lanes there is no order. So nothing may be in two of them: a request is in the prefill lane until the
step that ends its prompt is committed, and from then on in the decode lane, as are its slots and its blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.plan_builder import PlanBuilder
from scheduler.request import Request


@dataclass(eq=False, slots=True)
class Lane:
    """Engine thread only. ending: requests that are over, but a step in flight here still computes on their blocks.
    chunks: of prompts in steps in flight: step id, whose, and the position behind."""

    builder: PlanBuilder = field(default_factory=PlanBuilder)
    committed_step_id: int = -1
    ending: list[Request] = field(default_factory=list)
    chunks: deque[tuple[int, Request, int]] = field(default_factory=deque)

    def is_done_with(self, request: Request) -> bool:
        """Whether no step in flight computes on its blocks. request: one of this lane."""
        return request.last_step_id <= self.committed_step_id

    def computed(self, step_id: int) -> list[tuple[Request, int]]:
        """The chunks in the steps up to this one: whose, and the position behind. Not those of ended requests: what was
        wrong with them may be why they have ended. Mutates."""
        computed: list[tuple[Request, int]] = []
        while self.chunks and self.chunks[0][0] <= step_id:
            _, request, end = self.chunks.popleft()
            if not request.is_over:
                computed.append((request, end))
        return computed

    def committed(self, step_id: int) -> list[Request]:
        """Everything up to step_id has run: those who waited for it, who can be released now. Mutates."""
        self.committed_step_id = step_id
        due = [request for request in self.ending if request.last_step_id <= step_id]
        if due:
            self.ending = [request for request in self.ending if request.last_step_id > step_id]
        return due
