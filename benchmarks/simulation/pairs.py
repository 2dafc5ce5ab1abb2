"""Two H200s as campaigns measured them (`benchmarks.gpu.campaign`, pieces pair-*), and the simulator beside: each run
with the arrivals of the card's client, and what a campaign is going to find.

A campaign's run is 300 requests (120 of 8,192 tokens): with answers of 512 tokens that is 8 s of arrivals, which is not
the steady state that `roles` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.goodput_search import Limits, RatePoint
from benchmarks.simulation.factor_search import just_kept, next_factor
from benchmarks.simulation.lanes import LOADS, LaneLoadShape
from benchmarks.simulation.roles import STEP_TIMES, CardLayout, SimulatedCards
from cluster.load.arrivals import poisson_arrivals
from cluster.load.percentile import percentile
from cluster.simulation.client import Job
from cluster.simulation.cost_model import CostModel, load_costs

SPLIT, LANES = CardLayout("split", 1, 1), CardLayout("two_lanes", 0, 2)
BY_COST, COLOCATED = CardLayout("split", 1, 1, may_also=True), CardLayout("colocated", 0, 2)
# On 29 November chunks of a prompt behind its earlier ones were attended over the pool, and computed as 2,304 tokens.
EARLIER_PAIR_S = 2.6e-9
_FIRST_RATES = {"2048/128": 18.0, "512/512": 36.0, "8192/256": 2.5}
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Of one run, in ms."""

    p50_ttft_ms: float
    p90_ttft_ms: float
    p50_tpot_ms: float
    p90_tpot_ms: float

    def ratio(self, limits: Limits) -> float:
        """As Limits.ratio."""
        return max(self.p90_ttft_ms / limits.ttft_ms, self.p90_tpot_ms / limits.tpot_ms)

    @property
    def ttft(self) -> str:
        """For people."""
        return f"{self.p50_ttft_ms:.0f} / {self.p90_ttft_ms:.0f}"

    @property
    def tpot(self) -> str:
        """For people."""
        return f"{self.p50_tpot_ms:.1f} / {self.p90_tpot_ms:.1f}"


# main at 912340f, 29 November 2026: RESULTS, "H200, tenth day". By layout, load and rate.
MEASURED: dict[CardLayout, dict[tuple[str, float], PairFigures]] = {
    SPLIT: {
        ("2048/128", 16.0): PairFigures(96.3, 250.7, 5.45, 5.82),
        ("2048/128", 18.0): PairFigures(126.6, 344.4, 5.67, 5.90),
        ("2048/128", 19.0): PairFigures(168.3, 414.4, 5.70, 5.92),
        ("2048/128", 24.0): PairFigures(961.7, 1541.1, 5.90, 5.93),
        ("512/512", 26.0): PairFigures(28.2, 41.7, 7.72, 7.79),
        ("512/512", 33.5): PairFigures(34.0, 65.4, 8.76, 9.27),
        ("512/512", 36.5): PairFigures(37.5, 58.4, 9.22, 9.89),
        ("512/512", 37.5): PairFigures(34.2, 61.8, 9.32, 10.03),
        ("8192/256", 2.3): PairFigures(391.6, 993.5, 5.65, 6.19),
        ("8192/256", 2.4): PairFigures(415.9, 1060.5, 5.69, 6.20),
        ("8192/256", 2.6): PairFigures(455.8, 1297.5, 5.79, 6.22),
    },
    LANES: {
        ("2048/128", 18.0): PairFigures(118.0, 255.4, 7.63, 9.35),
        ("2048/128", 20.0): PairFigures(142.6, 316.6, 8.44, 9.86),
        ("2048/128", 22.5): PairFigures(231.2, 406.2, 9.29, 10.97),
        ("512/512", 26.0): PairFigures(34.8, 47.7, 7.09, 7.24),
        ("512/512", 36.0): PairFigures(39.1, 61.6, 8.04, 8.65),
        ("512/512", 41.5): PairFigures(42.5, 73.8, 8.41, 9.22),
        ("8192/256", 2.3): PairFigures(431.0, 814.6, 6.58, 9.59),
        ("8192/256", 2.5): PairFigures(434.8, 883.8, 6.84, 9.98),
        ("8192/256", 2.6): PairFigures(456.9, 870.4, 6.95, 10.34),
    },
}
# main at c67cf380, 30 November 2026: RESULTS, "H200, eleventh day". Long prompts' chunks are attended as now.
MEASURED_SINCE: dict[CardLayout, dict[tuple[str, float], PairFigures]] = {
    BY_COST: {
        ("2048/128", 18.0): PairFigures(87.3, 149.5, 6.10, 8.35),
        ("2048/128", 21.5): PairFigures(99.7, 179.9, 7.28, 9.86),
        ("8192/256", 2.6): PairFigures(243.7, 434.3, 6.91, 8.72),
        ("8192/256", 3.0): PairFigures(246.1, 475.3, 7.19, 9.47),
    },
}


def costs_as_measured() -> CostModel:
    """An H200's, with the engine of that day."""
    costs = load_costs(STEP_TIMES)
    steps = {
        pool: of.model_copy(update={"earlier_pair_s": EARLIER_PAIR_S})
        for pool, of in (("decode", costs.decode), ("prefill", costs.prefill))
    }
    return costs.model_copy(update=steps)


def campaign_figures(cards: SimulatedCards, load: LaneLoadShape, rate: float) -> PairFigures:
    """Of a campaign's run: seed 0. Blocks for some seconds."""
    arrivals = poisson_arrivals(rate, load.count, 0)
    clients = cards.run([Job(i, at_s, load.num_in, load.num_out, load.num_out) for i, at_s in enumerate(arrivals)])
    ttft = [1e3 * client.ttft_s for client in clients.clients]
    tpot = [1e3 * (client.tpot_s or 0.0) for client in clients.clients]
    return PairFigures(percentile(ttft, 50), percentile(ttft, 90), percentile(tpot, 50), percentile(tpot, 90))


def campaign_goodput(layout: CardLayout, name: str, costs: CostModel | None = None) -> float:
    """Requests a second, as a campaign names rates, at which the limits are just kept. The objective of first tokens is
    0.4 s whatever the load, as one server there has all of them. Blocks for a minute."""
    cards, load = SimulatedCards(layout, costs=costs), LOADS[name]
    points: list[RatePoint] = []
    while len(points) < _MOST_RUNS and (rate := next_factor(points, _FIRST_RATES[name])) is not None:
        points.append(RatePoint(rate, campaign_figures(cards, load, rate).ratio(load.limits)))
    return just_kept(points)


def print_measured(names: Sequence[str], say: Callable[[str], None]) -> None:
    """A line a run: simulated, then measured. Blocks for minutes."""
    say("layout | load at req/s | TTFT p50 / p90 | TPOT p50 / p90, ms | of the limits: simulated (measured)")
    for measured, costs in ((MEASURED, costs_as_measured()), (MEASURED_SINCE, None)):
        for layout, runs in measured.items():
            _print_runs(SimulatedCards(layout, costs=costs), runs, names, say)


def _print_runs(
    cards: SimulatedCards, runs: Mapping[tuple[str, float], PairFigures], names: Sequence[str],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    for (name, rate), real in runs.items():
        if name not in names:
            continue
        found, limits = campaign_figures(cards, LOADS[name], rate), LOADS[name].limits
        cells = f"{found.ttft} ({real.ttft}) | {found.tpot} ({real.tpot})"
        of_limits = f"{found.ratio(limits):.2f} ({real.ratio(limits):.2f})"
        say(f"{cards.layout.name} | {name} at {rate:4} | {cells} | {of_limits}")


def print_forecast(names: Sequence[str], say: Callable[[str], None]) -> None:
    """What campaigns will find with the engine of now: a line for each layout and load. Blocks for minutes."""
    for layout in (SPLIT, BY_COST, LANES, COLOCATED):
        for name in names:
            say(f"2 cards | {layout.name:15} | {name:8} | {campaign_goodput(layout, name):6.2f}")
