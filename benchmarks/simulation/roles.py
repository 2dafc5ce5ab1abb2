"""Cards that do both phases beside cards of one role, in the simulator: how much load each way to use them carries.

Llama-3.1-8B by an H200's step times. One load after the other, and a mix that changes each minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.goodput_search import Limits, RatePoint
from benchmarks.simulation.factor_search import just_kept, next_factor
from cluster.config.root import Config
from cluster.load.arrivals import poisson_arrivals
from cluster.load.percentile import percentile
from cluster.simulation.client import Client, ClientStatus, Job
from cluster.simulation.cost_model import CostModel, load_costs
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun
from cluster.simulation.system_shape import shape_of

STEP_TIMES = Path(__file__).parents[1] / "step_times" / "llama-3.1-8b-h200.json"
_KV_TOKENS = 400_000
_MINUTE_S = 60.0
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one shape for so long. rate: of a card. limits: of their p90s."""

    num_in: int
    num_out: int
    rate: float
    duration_s: float
    limits: Limits


def _phase(num_in: int, num_out: int, rate: float, duration_s: float) -> Phase:
    ttft_ms = 1000.0 if num_in >= 8192 else 400.0
    return Phase(num_in, num_out, rate, duration_s, Limits(ttft_ms, 10.0))


# At the rate a card carries of each when two are colocated, roughly: what is searched for is a factor on all of them.
LOADS = {
    "2048/128": (_phase(2048, 128, 8.0, 40.0),),
    "512/512": (_phase(512, 512, 15.0, 40.0),),
    "8192/256": (_phase(8192, 256, 1.3, 120.0),),
    "mix": tuple(_phase(*shape, _MINUTE_S) for shape in ((2048, 128, 8.0), (512, 512, 15.0), (8192, 256, 1.3))),
}


@dataclass(frozen=True, slots=True)
class CardLayout:
    """How cards are used. num_prefill 0: there is one pool. may_also: each card may do the other phase too."""

    layout: str
    num_prefill: int
    num_decode: int
    may_also: bool = False

    @property
    def name(self) -> str:
        if self.layout != "split":
            return f"{self.layout} x{self.num_decode}"
        return f"{self.num_prefill}P{self.num_decode}D" + (" by cost" if self.may_also else "")

    def config(self, ttft_s: float) -> Config:
        """ttft_s: the objective."""
        common = {"kv_capacity_tokens": _KV_TOKENS, "lag": 1, "device": "cuda", "num_gpus": 1}
        decode = common | {"max_batch_tokens": 2304, "max_running_sequences": 256}
        pools = {"decode": decode | {"replicas": self.num_decode}}
        if self.layout == "split":
            sizes = {"max_batch_tokens": 2048, "max_running_sequences": 64}
            if self.may_also:
                pools["decode"]["may_also"] = True
                sizes = {"max_batch_tokens": 2304, "max_running_sequences": 256, "may_also": True}
            pools["prefill"] = common | sizes | {"replicas": self.num_prefill}
        if self.layout == "two_lanes":
            decode["lanes"] = {"ttft_s": 0.4, "token_gap_s": 0.011}
            pools["decode"] = decode | {"replicas": self.num_decode}
        return Config.model_validate(
            {
                "model": {"source": "bundled", "max_model_len": 16_384},
                "layout": self.layout,
                "pools": pools,
                "slo": {"ttft_s": ttft_s, "tpot_s": 0.01},
                "routing": {"policy": "roles_by_cost" if self.may_also else "memory_then_queue"},
            }
        )


def layouts_of(num_cards: int) -> Iterator[CardLayout]:
    """All ways to use so many cards."""
    for num_prefill in range(1, num_cards):
        yield CardLayout("split", num_prefill, num_cards - num_prefill)
    yield CardLayout("colocated", 0, num_cards)
    yield CardLayout("two_lanes", 0, num_cards)
    for num_prefill in range(1, num_cards):
        yield CardLayout("split", num_prefill, num_cards - num_prefill, may_also=True)


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Of one phase's requests, in ms."""

    p90_ttft_ms: float
    p90_tpot_ms: float
    num_failed: int

    def ratio(self, limits: Limits) -> float:
        """As Limits.ratio."""
        if self.num_failed:
            return math.inf
        return max(self.p90_ttft_ms / limits.ttft_ms, self.p90_tpot_ms / limits.tpot_ms)


def jobs_of(phases: Sequence[Phase], num_cards: int, factor: float, seed: int) -> tuple[list[Job], list[int]]:
    """One phase after the other; and of which phase each job is."""
    jobs: list[Job] = []
    phase_of: list[int] = []
    begin_s = 0.0
    for number, phase in enumerate(phases):
        rate = phase.rate * num_cards * factor
        for at_s in poisson_arrivals(rate, math.ceil(2 * rate * phase.duration_s) + 50, seed + number):
            if at_s >= phase.duration_s:
                break
            jobs.append(Job(len(jobs), begin_s + at_s, phase.num_in, phase.num_out, phase.num_out))
            phase_of.append(number)
        begin_s += phase.duration_s
    return jobs, phase_of


class SimulatedCards:
    """Cards used in one way."""

    def __init__(self, layout: CardLayout, ttft_s: float = 0.4, costs: CostModel | None = None) -> None:
        """ttft_s: the objective that the system is told. costs: None: an H200's."""
        self.layout = layout
        self._costs = costs or load_costs(STEP_TIMES)
        config = layout.config(ttft_s)
        self._shape = shape_of(config, self._costs.kv_bytes_per_token, lane_shares=self._costs.lanes)

    def run(self, jobs: Sequence[Job]) -> SystemRun:
        """Blocks for some seconds."""
        return SimulatedSystem(self._shape, self._costs).run(jobs)

    def figures(self, phases: Sequence[Phase], factor: float, seed: int) -> list[PhaseFigures]:
        """Of each phase. Blocks for some seconds."""
        num_cards = self.layout.num_prefill + self.layout.num_decode
        jobs, phase_of = jobs_of(phases, num_cards, factor, seed)
        run = self.run(jobs)
        parts: list[list[Client]] = [[] for _ in phases]
        for client, number in zip(run.clients, phase_of, strict=True):
            parts[number].append(client)
        return [_figures(clients) for clients in parts]

    def ratio(self, phases: Sequence[Phase], factor: float, seeds: Sequence[int]) -> float:
        """The worst of all phases, in the mean of the seeds. 1.0: just kept."""
        ratios = []
        for seed in seeds:
            rows = self.figures(phases, factor, seed)
            ratios.append(max(row.ratio(phase.limits) for row, phase in zip(rows, phases, strict=True)))
        return sum(ratios) / len(ratios)

    def goodput(self, phases: Sequence[Phase], seeds: Sequence[int], first: float = 1.0) -> float:
        """The factor at which the limits are just kept. first: where to begin. Blocks for a minute or more."""
        points: list[RatePoint] = []
        while len(points) < _MOST_RUNS and (factor := next_factor(points, first)) is not None:
            points.append(RatePoint(factor, self.ratio(phases, factor, seeds)))
        return just_kept(points)


def _figures(clients: Sequence[Client]) -> PhaseFigures:
    failed = [client for client in clients if client.status is not ClientStatus.FINISHED]
    good = [client for client in clients if client.status is ClientStatus.FINISHED]
    if not good:
        return PhaseFigures(math.inf, math.inf, len(failed))
    ttft = percentile([1e3 * client.ttft_s for client in good], 90)
    tpot = percentile([1e3 * (client.tpot_s or 0.0) for client in good], 90)
    return PhaseFigures(ttft, tpot, len(failed))


def shortened(phases: Sequence[Phase], part: float) -> tuple[Phase, ...]:
    """The same for a part of the time."""
    return tuple(replace(phase, duration_s=part * phase.duration_s) for phase in phases)


def print_goodputs(
    num_cards: int,
    names: Sequence[str],
    layouts: Sequence[CardLayout],
    seeds: Sequence[int],
    part: float,
    say: Callable[[str], None],
) -> None:
    """A line for each layout and load: requests a second of all cards; of the mix, the factor on its rates. part: of
    the time that loads last. Blocks for a minute or less a line."""
    found: dict[str, float] = {}  # of the layout before, where the next one's search begins
    for layout in layouts:
        for name in names:
            phases = shortened(LOADS[name], part)
            ttft_s = 0.4 if name == "mix" else phases[0].limits.ttft_ms / 1e3
            factor = SimulatedCards(layout, ttft_s).goodput(phases, seeds, found.get(name) or 1.0)
            found[name] = factor
            rate = factor if name == "mix" else factor * num_cards * phases[0].rate
            say(f"{num_cards} cards | {layout.name:15} | {name:8} | {rate:6.2f}")
