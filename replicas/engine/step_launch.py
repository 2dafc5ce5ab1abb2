"""A plan on its way: launched whole, held against grammars where its rows have some, or in pieces where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from replicas.engine.open_calls import OpenCalls
from replicas.engine.step_isolation import run_isolated
from replicas.model.model_runner import ModelRunner, StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.engine_core import EngineCore
from scheduler.plan import StepOutput, StepPlan

logger = logging.getLogger(__name__)


class StepLaunch:
    """Engine thread only."""

    def __init__(self, core: EngineCore[Any], calls: OpenCalls, commit: Callable[[Any], None]) -> None:
        """commit: takes the tokens of a step that is in flight. Blocks until it has run."""
        self._core, self._calls, self._commit = core, calls, commit

    def launch(self, runner: ModelRunner, plan: StepPlan) -> StepHandle | StepOutput:
        """Requests that make it fail are ended. Mutates; blocks on the CPU, and for masks."""
        if self._calls.constrained.concern(plan):
            return self._launch_constrained(runner, plan)
        try:
            return runner.launch(plan)
        except Exception as error:
            return self._launch_in_pieces(runner, plan, error)

    def _launch_constrained(self, runner: ModelRunner, plan: StepPlan) -> StepHandle | StepOutput:
        """While the pass runs, the tokens of the steps in front of it are taken, and the masks are made that depend on
        them; then the tokens are chosen. Rows with room for what their grammars force have to wait for these tokens."""
        if self._calls.constrained.may_force(plan):
            for step in self._core.in_front():
                self._commit(step)
            plan = self._calls.constrained.guessed(plan)
        forwarded, failure = None, None
        try:
            forwarded = runner.forward(plan)
        except Exception as error:
            failure = error
        for step in self._core.in_front():
            self._commit(step)
        masks = self._calls.masks(plan)
        if forwarded is not None:
            try:
                return runner.choose(forwarded, masks)
            except Exception as error:
                failure = error
        assert failure is not None
        return self._launch_in_pieces(runner, plan, failure, masks)

    def _launch_in_pieces(
        self, runner: ModelRunner, plan: StepPlan, error: Exception, masks: TokenMasks | None = None
    ) -> StepOutput:
        extra = {"event": "step_failed", "step": plan.step_id}
        logger.warning("step failed, running it in pieces", exc_info=error, extra=extra)
        isolated = run_isolated(runner, plan, masks)
        for request_id, failed_by in isolated.errors.items():
            self._calls.fail(request_id, failed_by)
        return isolated.output
