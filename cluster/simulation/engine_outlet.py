"""Where a simulated engine puts what it has to say."""

from __future__ import annotations

from typing import Protocol

from cluster.simulation.client import Attempt
from cluster.simulation.simulated_frame import SimulatedFrame
from replicas.messages import EngineLoad
from scheduler.outcome import PromptDone, PromptPart


class EngineOutlet(Protocol):
    """All leaves at now_s, and is heard later. ready_s: when KV may be read."""

    def send_frame(self, replica_id: str, frame: SimulatedFrame, now_s: float) -> None:
        """Of an engine that decodes."""

    def offer_part(self, attempt: Attempt, part: PromptPart, ready_s: float) -> None:
        """Some of a prompt that is handed over is computed: the part to its reader."""

    def answer_prompt(self, attempt: Attempt, done: PromptDone, load: EngineLoad, now_s: float, ready_s: float) -> None:
        """A prompt is computed that is handed over: the answer to its router, and the handoff, or the last part of it,
        if there is one."""

    def release(self, attempt: Attempt, now_s: float) -> None:
        """This engine is done with the source's blocks, or does not want them."""
