"""What one ingress tells Serve's controller of the work there is, and what all of them say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from replicas.messages import EngineLoad


@dataclass(frozen=True, slots=True)
class DemandReport:
    """The first five are the ingress's own, so those of all are summed; the others are what it heard from replicas,
    which all ingresses hear alike.

    arrived_prompt_tokens: of all requests since it started. waiting_prompt_tokens: of requests that have no token yet.
    waiting_blocks: that requests not yet admitted will use on decode. decode_blocks: by projection of all who were
    admitted, over the pool; decode_replica_blocks: what one replica has. decode_sequences: running or waiting there.
    decode_step_s: mean of the replicas with work; 0.0: none has. prefill_tokens_per_s: of one replica; 0.0: not known.
    """

    num_open: int
    arrived_prompt_tokens: int
    waiting_prompt_tokens: int
    waiting_blocks: int
    num_held: int  # for a pool without replicas
    decode_blocks: int = 0
    decode_replica_blocks: int = 0
    decode_sequences: int = 0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def to_stats(self) -> dict[str, float]:
        """Flat, numbers only."""
        return {name: float(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_stats(stats: Mapping[str, float]) -> DemandReport:
        """Raises KeyError when a figure is missing. Other keys are left alone."""
        return DemandReport(
            num_open=int(stats["num_open"]),
            arrived_prompt_tokens=int(stats["arrived_prompt_tokens"]),
            waiting_prompt_tokens=int(stats["waiting_prompt_tokens"]),
            waiting_blocks=int(stats["waiting_blocks"]),
            num_held=int(stats["num_held"]),
            decode_blocks=int(stats["decode_blocks"]),
            decode_replica_blocks=int(stats["decode_replica_blocks"]),
            decode_sequences=int(stats["decode_sequences"]),
            decode_step_s=stats["decode_step_s"],
            prefill_tokens_per_s=stats["prefill_tokens_per_s"],
        )


def heard_figures(decodes: Sequence[EngineLoad], prefills: Sequence[EngineLoad]) -> dict[str, float]:
    """The figures that come from replicas' loads. prefills: of the replicas that compute prompts, decode's if
    colocated.
    """
    busy_s = [load.step_s for load in decodes if load.num_running and load.step_s > 0.0]
    rates = [load.prefill_tokens_per_s for load in prefills if load.prefill_tokens_per_s > 0.0]
    return {
        "decode_blocks": sum(load.total_blocks - load.free_blocks for load in decodes if load.num_running),
        "decode_replica_blocks": max((load.total_blocks for load in decodes), default=0),
        "decode_sequences": sum(load.num_running + load.num_queued for load in decodes),
        "decode_step_s": sum(busy_s) / len(busy_s) if busy_s else 0.0,
        "prefill_tokens_per_s": sum(rates) / len(rates) if rates else 0.0,
    }


def combined(reports: Sequence[DemandReport]) -> DemandReport:
    """Of all ingresses. Raises ValueError without any."""
    if not reports:
        raise ValueError("no ingress has reported")
    return DemandReport(
        num_open=sum(report.num_open for report in reports),
        arrived_prompt_tokens=sum(report.arrived_prompt_tokens for report in reports),
        waiting_prompt_tokens=sum(report.waiting_prompt_tokens for report in reports),
        waiting_blocks=sum(report.waiting_blocks for report in reports),
        num_held=sum(report.num_held for report in reports),
        decode_blocks=max(report.decode_blocks for report in reports),
        decode_replica_blocks=max(report.decode_replica_blocks for report in reports),
        decode_sequences=max(report.decode_sequences for report in reports),
        decode_step_s=max(report.decode_step_s for report in reports),
        prefill_tokens_per_s=max(report.prefill_tokens_per_s for report in reports),
    )
