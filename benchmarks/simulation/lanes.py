"""Two lanes on one H200 in the simulator: what a table of shares and a rule that chooses among them would give.

Its load is that of `benchmarks.gpu.campaign`, to the arrival: seed 0 sends what that sends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.gpu.goodput_search import Limits
from cluster.config.file import load_config
from cluster.load.arrivals import poisson_arrivals
from cluster.load.percentile import percentile
from cluster.simulation.client import Job
from cluster.simulation.cost_model import ControlCosts, CostModel, load_costs
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import SystemShape, shape_of
from scheduler.lane_split import LaneLoad, LaneObjectives, LaneShare, ShareChooser, choose_share

STEP_TIMES = Path(__file__).parents[1] / "step_times" / "llama-3.1-8b-h200.json"
_CONFIG = Path(__file__).parents[2] / "configs" / "gpu-one-card.yaml"
_KV_TOKENS = 400_000
# What a server under load keeps of the rates that it measured at start (2,048 tokens beside 16 rows of 1,024), fitted
# by hand to MEASURED. And what the host adds to a step, and HTTP to a token.
_KEPT = (0.95, 0.91)
_STEP_S = 0.0002
# Of a prompt's time on a card that is warm, what it takes when a server measures its shares: what becomes of that later
# is in _KEPT.
_AT_START = 0.95
_HTTP = ControlCosts(ingress_s=0.005, call_s=0.002, frame_s=0.002, stream_s=0.002)


@dataclass(frozen=True, slots=True)
class LaneLoadShape:
    """Tokens in and out, requests of a run, limits of a goodput, and rates between which that lies."""

    num_in: int
    num_out: int
    count: int
    limits: Limits
    rates: tuple[float, float]


LOADS = {
    "2048/128": LaneLoadShape(2048, 128, 300, Limits(400.0, 10.0), (5.0, 12.0)),
    "8192/256": LaneLoadShape(8192, 256, 120, Limits(1000.0, 10.0), (0.6, 2.0)),
    "512/512": LaneLoadShape(512, 512, 300, Limits(400.0, 10.0), (10.0, 30.0)),
}


def most_work(load: LaneLoad, objectives: LaneObjectives, shares: Sequence[LaneShare]) -> LaneShare:
    """The rule of before: among shares that keep both objectives the one that does the most work in all."""
    shipped = choose_share(load, objectives, shares)
    if shipped not in shares:
        return shipped

    def misses(share: LaneShare) -> tuple[float, float]:
        itl = load.rates.decode_step_s / share.decode_rate / objectives.token_gap_s
        rate = load.rates.prefill_tokens_per_s * share.prefill_rate
        wait_s = load.oldest_wait_s + (load.num_prompt_tokens / rate if rate else 0.0)
        return max(1.0, itl, wait_s / objectives.ttft_s), -share.gain

    return min(shares, key=misses)


RULES: dict[str, ShareChooser] = {"shipped": choose_share, "most-work": most_work}

# Rates that servers measured at start (multiprocessors of prompts, rates of prompts and of rows), and what they then
# did with `most-work`, 0.4 s and 12 ms: ms at 7.1, 8 and 12 req/s of 2,048/128.
MEASURED = {
    "torch's own products, three shares": (
        ((100, 0.599, 0.573), (92, 0.508, 0.552), (68, 0.474, 0.706)),
        {7.1: (156, 355, 8.5, 11.5), 8.0: (178, 404, 9.4, 11.8), 12.0: (506, 944, 12.7, 14.3)},
    ),
    "cuBLAS told the number, five": (
        ((108, 0.556, 0.568), (100, 0.556, 0.535), (92, 0.513, 0.603), (84, 0.492, 0.640), (68, 0.404, 0.734)),
        {7.1: (210, 431, 8.7, 11.3), 8.0: (249, 493, 9.7, 11.6), 12.0: (854, 1267, 11.0, 13.3)},
    ),
    "tuned products, five": (
        ((116, 0.769, 0.381), (92, 0.571, 0.472), (84, 0.566, 0.544), (76, 0.541, 0.590), (68, 0.475, 0.642)),
        {7.1: (131, 281, 9.0, 15.2), 8.0: (144, 325, 10.1, 15.8), 12.0: (303, 512, 16.6, 23.2)},
    ),
}


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """Means over seeds, in ms."""

    p50_ttft_ms: float
    p90_ttft_ms: float
    p90_tpot_ms: float
    p99_itl_ms: float

    def ratio(self, limits: Limits) -> float:
        """As Limits.ratio."""
        return max(self.p90_ttft_ms / limits.ttft_ms, self.p90_tpot_ms / limits.tpot_ms)

    def __str__(self) -> str:
        return f"{self.p50_ttft_ms:5.0f} /{self.p90_ttft_ms:5.0f} | {self.p90_tpot_ms:5.1f} | {self.p99_itl_ms:5.1f}"


class SimulatedCard:
    """One card, divided by a rule."""

    def __init__(
        self, shares: Sequence[LaneShare], objectives: LaneObjectives | None = None, rule: ShareChooser = choose_share
    ) -> None:
        """shares: as measured at start. objectives: None: those of configs/gpu-one-card.yaml."""
        config = load_config(_CONFIG)
        costs = load_costs(STEP_TIMES)
        prompt_token_s = _AT_START * costs.decode.prompt_token_s
        steps = costs.decode.model_copy(
            update={"base_s": costs.decode.base_s + _STEP_S, "prompt_token_s": prompt_token_s}
        )
        self._costs: CostModel = costs.model_copy(update={"decode": steps, "control": _HTTP})
        shape = shape_of(config, costs.kv_bytes_per_token, kv_tokens=(0, _KV_TOKENS))
        kept = tuple(
            LaneShare(share.num_processors, share.prefill_rate * _KEPT[0], share.decode_rate * _KEPT[1])
            for share in shares
        )
        decode = replace(shape.decode, shares=kept, chooser=rule, lanes=objectives or shape.decode.lanes)
        self._shape: SystemShape = replace(shape, decode=decode)

    def figures(self, load: LaneLoadShape, rate: float, seeds: Sequence[int]) -> LaneFigures:
        """Blocks for about a second a seed."""
        rows = [self._run(load, rate, seed) for seed in seeds]
        return LaneFigures(*(fmean(column) for column in zip(*rows, strict=True)))

    def goodput(self, load: LaneLoadShape, seeds: Sequence[int], num_halvings: int = 5) -> float:
        """The rate at which the mean of the seeds just keeps the limits, by bisection. Blocks."""
        low, high = load.rates
        for _ in range(num_halvings):
            middle = (low + high) / 2
            if self.figures(load, middle, seeds).ratio(load.limits) <= 1.0:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _run(self, load: LaneLoadShape, rate: float, seed: int) -> tuple[float, float, float, float]:
        arrivals = poisson_arrivals(rate, load.count, seed)
        jobs = [Job(i, at_s, load.num_in, load.num_out, load.num_out) for i, at_s in enumerate(arrivals)]
        run = SimulatedSystem(self._shape, self._costs).run(jobs)
        ttft = [1e3 * client.ttft_s for client in run.clients]
        tpot = [1e3 * (client.tpot_s or math.nan) for client in run.clients]
        return percentile(ttft, 50), percentile(ttft, 90), percentile(tpot, 90), 1e3 * run.gaps.percentile(99)


def with_noise(shares: Sequence[LaneShare], share: float, seed: int) -> tuple[LaneShare, ...]:
    """Each rate up to so much (0.03: 3 %) more or less."""
    rng = random.Random(f"noise {seed}")
    return tuple(
        LaneShare(
            s.num_processors,
            s.prefill_rate * rng.uniform(1 - share, 1 + share),
            s.decode_rate * rng.uniform(1 - share, 1 + share),
        )
        for s in shares
    )


def print_measured(say: Callable[[str], None]) -> None:
    """Simulated beside what was measured: whether the simulator can be believed."""
    for name, (table, runs) in MEASURED.items():
        card = SimulatedCard([LaneShare(*row) for row in table], LaneObjectives(0.4, 0.012), most_work)
        for rate, (p50, p90, tpot, itl) in runs.items():
            say(f"{name:36} {rate:4} req/s: {card.figures(LOADS['2048/128'], rate, (0,))}")
            say(f"{'measured':48}  {p50:5} /{p90:5} | {tpot:5} | {itl:5}")


def print_rule(card: SimulatedCard, seeds: Sequence[int], names: Sequence[str], say: Callable[[str], None]) -> None:
    """Latencies at some rates, and goodputs: of seed 0, as a campaign has it, and the mean of all seeds."""
    rates = {"2048/128": (4.0, 8.0, 9.0, 12.0), "8192/256": (1.0, 1.3), "512/512": (13.0, 19.5)}
    for name in names:
        for rate in rates[name]:
            of_campaign, of_all = (card.figures(LOADS[name], rate, chosen) for chosen in ((0,), seeds))
            say(f"{name} at {rate:4}: {of_campaign}   (mean of {len(seeds)}: {of_all})")
        goodputs = [card.goodput(LOADS[name], chosen) for chosen in ((0,), seeds)]
        say(f"{name} goodput: {goodputs[0]:.2f} req/s   (mean: {goodputs[1]:.2f})")
