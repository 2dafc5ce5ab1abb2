"""What one ingress tells Serve's controller of the work there is, and what all of them say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from replicas.messages import EngineLoad


@dataclass(frozen=True, slots=True)
class HeardFigures:
    """From the loads that replicas report. All ingresses hear them alike, so they are not summed over ingresses.

    decode_blocks: in use, by projection of all who were admitted, over the pool; replica_blocks: what one replica has.
    decode_sequences: running or waiting there. decode_step_s: mean of the replicas with work; 0.0: none has.
    prefill_tokens_per_s: of one replica that computes prompts; 0.0: not known.
    """

    decode_blocks: float = 0.0
    replica_blocks: float = 0.0
    decode_sequences: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DemandReport:
    """One ingress's. arrived_prompt_tokens: since it started. coming_prompt_tokens: of requests without a token yet;
    waiting_prompt_tokens: of those among them that wait for nothing but their prompt to be computed (not for memory on
    decode, which more prefill replicas do not give them).

    waiting_blocks: that requests not yet admitted will use on decode. num_held: wait for a pool without replicas.
    """

    num_open: float
    arrived_prompt_tokens: float
    coming_prompt_tokens: float
    waiting_prompt_tokens: float
    waiting_blocks: float
    num_held: float
    heard: HeardFigures = HeardFigures()

    def to_stats(self) -> dict[str, float]:
        """Flat, numbers only."""
        stats = asdict(self)
        heard: dict[str, float] = stats.pop("heard")
        return {name: float(value) for name, value in (stats | heard).items()}

    @staticmethod
    def from_stats(stats: Mapping[str, float]) -> DemandReport:
        """Raises KeyError when a figure is missing. Other keys are left alone."""
        heard = HeardFigures(**{field.name: stats[field.name] for field in fields(HeardFigures)})
        return DemandReport(**{name: stats[name] for name in _OWN}, heard=heard)


_OWN = tuple(field.name for field in fields(DemandReport) if field.name != "heard")


def heard_figures(decodes: Sequence[EngineLoad], prefills: Sequence[EngineLoad]) -> HeardFigures:
    """prefills: of the replicas that compute prompts, which are decode's when colocated."""
    busy_s = [load.step_s for load in decodes if load.num_running and load.step_s > 0.0]
    rates = [load.prefill_tokens_per_s for load in prefills if load.prefill_tokens_per_s > 0.0]
    return HeardFigures(
        decode_blocks=sum(load.total_blocks - load.free_blocks for load in decodes),
        replica_blocks=max((load.total_blocks for load in decodes), default=0),
        decode_sequences=sum(load.num_running + load.num_queued for load in decodes),
        decode_step_s=sum(busy_s) / len(busy_s) if busy_s else 0.0,
        prefill_tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
    )


def combined(reports: Sequence[DemandReport]) -> DemandReport:
    """Of all ingresses: their own figures summed, of what all hear the largest. Raises ValueError without any."""
    if not reports:
        raise ValueError("no ingress has reported")
    own = {name: sum(getattr(report, name) for report in reports) for name in _OWN}
    names = [field.name for field in fields(HeardFigures)]
    heard = {name: max(getattr(report.heard, name) for report in reports) for name in names}
    return DemandReport(**own, heard=HeardFigures(**heard))
