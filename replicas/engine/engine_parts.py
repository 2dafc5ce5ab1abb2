"""What an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.engine.constrained_rows import Grammars
from replicas.engine.step_recorder import StepRecorder
from replicas.fault_points import FaultPoints
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.model.model_runner import ModelRunner
from scheduler.lane_split import LaneObjectives
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What every engine is made of. num_threads: torch's, fixed. objectives: of one with two lanes. grammars: None
    where no text can be held against one.
    """

    scheduler: Scheduler
    runner: ModelRunner
    faults: FaultPoints
    metrics: EngineMetrics
    num_threads: int
    recorder: StepRecorder = field(default_factory=StepRecorder)
    objectives: LaneObjectives = field(default_factory=LaneObjectives)
    grammars: Grammars | None = None
