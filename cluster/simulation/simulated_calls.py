"""The calls that a simulated engine was sent, and what comes of them, as in replicas.engine.open_calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

from cluster.simulation.client import Attempt
from cluster.simulation.engine_outlet import EngineOutlet
from cluster.simulation.gap_histogram import GapHistogram
from cluster.simulation.simulated_device import SimulatedDevice, StepInFlight
from cluster.simulation.simulated_frame import SimulatedFrame
from replicas.messages import EngineLoad
from scheduler.engine_core import EngineCore, Turn
from scheduler.generated_token import Token
from scheduler.lane import Lane
from scheduler.plan import Accepted, SampledToken, StepOutput
from scheduler.request import Request, RequestState


class SimulatedCalls:
    """All within an iteration. by_id: by request id, whatever has become of them. gaps: between tokens of decode."""

    def __init__(
        self,
        replica_id: str,
        core: EngineCore[StepInFlight],
        device: SimulatedDevice,
        outlet: EngineOutlet,
        load: Callable[[], EngineLoad],
    ) -> None:
        """device, load: the engine's."""
        self.by_id: dict[str, Attempt] = {}
        self.gaps = GapHistogram()
        self.last_commit_s = 0.0
        self._replica_id, self._core, self._scheduler = replica_id, core, core.scheduler
        self._device, self._outlet, self._load = device, outlet, load
        self._sends_frames = core.scheduler.capabilities.decodes
        self._frame = SimulatedFrame()
        self._last_load = load()

    def submit(self, attempt: Attempt, request: Request, now_s: float) -> None:
        """A call has come."""
        self.by_id[attempt.request_id] = attempt
        self._scheduler.submit(request, now_s)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The router has gone. A lease goes on until its reader says so."""
        request = self._scheduler.get(request_id)
        if request is not None and request.state is not RequestState.LEASED:
            self._scheduler.end(request_id, RequestState.CANCELLED, now_s)

    def lease_ended(self, request_id: str, now_s: float) -> None:
        """The reader is done with the blocks, or does not want them. A prompt that is not computed yet ends with it:
        its router does not wait for it."""
        request = self._scheduler.get(request_id)
        if request is not None and request.state is RequestState.PREFILLING:
            self._scheduler.end(request_id, RequestState.FAILED, now_s)
        self._scheduler.lease_ended(request_id, now_s)

    def turned(self, turn: Turn) -> None:
        """What a turn decided is told to those concerned. That a request's time is up, its router knows by itself."""
        for request in turn.admitted:
            self._note_found(request)
        self._frame.admitted += [self.by_id[request.request_id] for request in turn.admitted if not request.hands_over]
        self._frame.evicted += [self.by_id[request.request_id] for request in turn.evicted]

    def _note_found(self, request: Request) -> None:
        """Once more when its prompt is computed: what host memory had of it came behind its admission."""
        attempt = self.by_id[request.request_id]
        if request.hands_over:
            attempt.prefill_found = request.num_cached
        else:
            attempt.decode_found = request.num_cached

    def output_of(self, step: StepInFlight) -> StepOutput:
        """The tokens that it samples."""
        tokens: list[SampledToken] = []
        accepted: list[Accepted] = []
        for request_id, num_drafts in zip_longest(step.request_ids, step.num_drafts, fillvalue=0):
            assert isinstance(request_id, str), "every row samples"
            request, attempt = self._scheduler.get(request_id), self.by_id[request_id]
            num_known = request.sequences[0].num_known if request is not None else 0
            if request is not None and not num_known:
                self._note_found(request)
            num_held = attempt.num_held(num_drafts) if num_drafts else 0
            tokens += [
                SampledToken(request_id, 0, attempt.token(known))
                for known in range(num_known, num_known + 1 + num_held)
            ]
            if num_drafts:
                accepted.append(Accepted(request_id, 0, 1 + num_held, 1 + num_drafts, num_drafts))
        return StepOutput(step.step_id, tuple(tokens), accepted=tuple(accepted))

    def ran(self, step: StepInFlight, output: StepOutput, now_s: float, lane: Lane | None = None) -> None:
        """A step has run, and given this. lane: as `EngineCore.commit`."""
        if step.plan is not None and self._scheduler.drafts is not None:
            self._scheduler.drafts.step_took(step.plan, output.accepted, step.step_s)
        self.stepped(output, now_s, lane)

    def stepped(self, output: StepOutput, now_s: float, lane: Lane | None = None) -> None:
        """A step's tokens are known: commit them, and pass on what follows. lane: as `EngineCore.commit`."""
        events = self._core.commit(output, now_s, lane)
        for event in events.tokens:
            self._count(event, now_s)
        for part in events.parts:
            attempt = self.by_id[part.request_id]
            self._outlet.offer_part(attempt, part, self._digested_s(attempt, len(part.block_ids), now_s))
        for done in events.prompts:
            attempt = self.by_id[done.request_id]
            num_left = max(0, len(done.block_ids) - attempt.num_offered_blocks)
            ready_s = self._digested_s(attempt, num_left, now_s)
            self._outlet.answer_prompt(attempt, done, self._load(), now_s, ready_s)
        self.last_commit_s = now_s

    def _digested_s(self, attempt: Attempt, num_blocks: int, now_s: float) -> float:
        """When so many blocks more may be read. Mutates."""
        attempt.num_offered_blocks += num_blocks
        return self._device.digest(num_blocks * self._scheduler.limits.block_size, now_s)

    def _count(self, event: Token, now_s: float) -> None:
        attempt = self.by_id[event.request_id]
        if event.index == 0:
            self._frame.first_tokens.append(attempt)
        if attempt.client.num_tokens + attempt.num_tokens:
            self.gaps.add(now_s - attempt.last_token_s)
        attempt.num_tokens += 1
        attempt.last_token_s = now_s
        attempt.has_moved = True
        if event.finish_reason is not None:
            self._frame.finished.append(attempt)

    def steps_passed(self, commits_s: Sequence[float]) -> None:
        """Steps were committed then that gave every running request a token, and nothing else to anybody. Mutates."""
        requests = self._scheduler.batch.requests
        for before_s, after_s in pairwise([self.last_commit_s, *commits_s]):
            self.gaps.add(after_s - before_s, len(requests))
        self.last_commit_s = commits_s[-1]
        for request in requests:
            attempt = self.by_id[request.request_id]
            attempt.num_tokens += len(commits_s)
            attempt.last_token_s = self.last_commit_s

    def flush(self, now_s: float) -> None:
        """What this iteration produced leaves."""
        if not self._sends_frames:
            return
        load = self._load()
        if load != self._last_load:
            self._last_load = self._frame.load = load
        if not self._frame.is_empty:
            frame, self._frame = self._frame, SimulatedFrame()
            self._outlet.send_frame(self._replica_id, frame, now_s)
