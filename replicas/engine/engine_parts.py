"""What an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from replicas.engine.step_recorder import StepRecorder
from replicas.fault_points import FaultPoints
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.model.model_runner import ModelRunner
from scheduler.engine_scheduler import EngineScheduler

SchedulerT = TypeVar("SchedulerT", bound=EngineScheduler)


@dataclass(frozen=True, slots=True)
class EngineParts(Generic[SchedulerT]):
    """What every engine is made of. lag: steps planned ahead of known tokens. num_threads: torch's, fixed."""

    scheduler: SchedulerT
    runner: ModelRunner
    faults: FaultPoints
    metrics: EngineMetrics
    lag: int
    num_threads: int
    recorder: StepRecorder = field(default_factory=StepRecorder)
