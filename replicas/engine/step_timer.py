"""How long steps take: on a CPU until they are launched, on a GPU until their tokens are back; when the next must be
launched."""

from __future__ import annotations

from collections import deque

from scheduler.plan import StepPlan

_KEPT = 4  # of the last steps of a kind the fastest counts
# Of the host's time before a launch the longest of late counts: it fades by so much a step.
_FADING = 0.98
_MARGIN_S = 0.0005
# A step with prompts is not expected to end later than this part of what its tokens took before.
_PROMPT_SHARE = 0.8


class StepTimer:
    """Engine thread only. A step that still runs when it is launched begins then, or when the one before it has ended,
    whichever is later, and ends when its tokens have been read back.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[StepPlan, float]] = deque()
        self._last_end_s = 0.0
        self._row_steps_s: deque[float] = deque(maxlen=_KEPT)  # those without prompts
        self._prompt_tokens_s: deque[float] = deque(maxlen=_KEPT)  # a token, of those with
        self._host_s = 0.0

    def launched(self, plan: StepPlan, started_s: float) -> None:
        """It was launched at started_s and still runs. Mutates."""
        self._running.append((plan, started_s))

    def prepared(self, plan: StepPlan, host_s: float) -> None:
        """The host took so long to plan and launch it. Mutates."""
        if not plan.chunks:  # launching prompts takes longer, but the device begins with the first of their layers
            self._host_s = max(host_s, self._host_s * _FADING)

    def committed(self, step_id: int, now_s: float) -> tuple[StepPlan, float] | None:
        """Its tokens are here: the step and its seconds; None if it was not running. Forgets those before. Mutates."""
        found = None
        while self._running and self._running[0][0].step_id <= step_id:
            plan, started_s = self._running.popleft()
            if plan.step_id == step_id:
                found = plan, now_s - max(started_s, self._last_end_s)
        if found is not None:
            self._last_end_s = now_s
            self._learn(*found)
        return found

    def latest_launch_s(self) -> float:
        """Until when planning the next step can wait without the device having to: whatever arrives until then is in
        it. Not later than what is in flight is expected to end; 0.0 where nothing is, or nobody knows.
        """
        if not self._running:
            return 0.0
        end_s = max(self._running[0][1], self._last_end_s)
        for plan, _ in self._running:
            expected_s = self._expected_s(plan)
            if not expected_s:
                return 0.0
            end_s += expected_s
        return end_s - self._host_s - _MARGIN_S

    def _expected_s(self, plan: StepPlan) -> float:
        if plan.num_prefill_tokens:
            return _PROMPT_SHARE * plan.num_prefill_tokens * min(self._prompt_tokens_s, default=0.0)
        return min(self._row_steps_s, default=0.0)

    def _learn(self, plan: StepPlan, duration_s: float) -> None:
        if num_tokens := plan.num_prefill_tokens:
            self._prompt_tokens_s.append(duration_s / num_tokens)
        else:
            self._row_steps_s.append(duration_s)
