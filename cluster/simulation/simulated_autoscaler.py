"""Replicas that come and go in a simulated system, as a policy wants and with the time that a start takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.autoscaling.pool_scaler import PoolState, ScalerMemory, decide_replicas
from cluster.autoscaling.scaling_rules import ScalingRules
from cluster.config.autoscaling import GUESSED_START_S
from cluster.routing.demand_report import DemandReport
from cluster.simulation.event_queue import Action, Order
from cluster.simulation.simulated_system import SimulatedSystem

_INTERVAL_S = 1.0


class ScalingPolicy(Protocol):
    """Says how many replicas to have. ongoing: calls that Serve would count at each pool; reports: by ingress."""

    def decide(
        self,
        now_s: float,
        reports: Mapping[str, DemandReport],
        pools: Mapping[str, PoolState],
        ongoing: Mapping[str, int],
    ) -> Mapping[str, int]: ...


class ShippedPolicy:
    """cluster.autoscaling.pool_scaler with its memory, as cluster.autoscaling.autoscaling_policy runs it."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        self._memory: ScalerMemory | None = None

    def decide(
        self,
        now_s: float,
        reports: Mapping[str, DemandReport],
        pools: Mapping[str, PoolState],
        ongoing: Mapping[str, int],
    ) -> Mapping[str, int]:
        targets, self._memory = decide_replicas(now_s, reports, self._rules, pools, self._memory)
        return targets


@dataclass(slots=True)
class _Life:
    """One replica, from when it was ordered. name: once it has started. retired: it takes no more work."""

    ordered_s: float
    name: str | None = None
    retired: bool = False
    ended_s: float | None = None


@dataclass(slots=True)
class _Pool:
    bounds: tuple[int, int]
    target: int
    lives: list[_Life] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScalingSample:
    """targets and replicas that take work, by pool, at one time."""

    time_s: float
    targets: dict[str, int]
    running: dict[str, int]


class SimulatedAutoscaler:
    """Use once, before the system runs. A replica costs from its order until it has drained."""

    def __init__(
        self,
        system: SimulatedSystem,
        policy: ScalingPolicy,
        bounds: Mapping[str, tuple[int, int]],
        start_delay_s: float,
        tells_routers: bool = True,
    ) -> None:
        """bounds: fewest and most replicas of each pool, by name. start_delay_s: from the order to the first work.
        tells_routers: what is on its way, so that who waits has patience."""
        self._system, self._policy, self._start_delay_s = system, policy, start_delay_s
        self._pools = {
            name: _Pool(limits, len(pool.engines), [_Life(0.0, replica) for replica in pool.engines])
            for name, limits in bounds.items()
            for pool in (system.pools[name],)
        }
        for router in system.routers if tells_routers else ():
            router.waits.orders.expect(dict.fromkeys(self._pools, GUESSED_START_S))
        self._stepped: dict[str, tuple[float, int]] = {}  # decode replica: busy seconds and steps at the last look
        self.samples: list[ScalingSample] = []
        system.queue.at(0.0, Order.SAMPLE, 1, self._tick)

    def replica_hours(self) -> dict[str, float]:
        """By pool, until the last look, which is within a second of the end of the last request."""
        now_s = self.samples[-1].time_s
        return {
            name: sum((now_s if life.ended_s is None else life.ended_s) - life.ordered_s for life in pool.lives) / 3600
            for name, pool in self._pools.items()
        }

    def _tick(self, now_s: float) -> None:
        system = self._system
        for decode in system.decodes.values():
            decode.settle(now_s)
        self._end_drained(now_s)
        step_s = self._mean_step_s()
        reports = {}
        for index, router in enumerate(system.routers):
            report = router.demand.report()
            # Simulated loads leave the step time out.
            reports[str(index)] = replace(report, heard=replace(report.heard, decode_step_s=step_s))
        states = {
            name: PoolState(pool.target, self._num_running(name), pool.bounds) for name, pool in self._pools.items()
        }
        targets = self._policy.decide(now_s, reports, states, self._ongoing(reports))
        for name, pool in self._pools.items():
            pool.target = targets[name]
            self._follow(name, pool, now_s)
        for router in system.routers:
            router.waits.orders.wanted({name: pool.target for name, pool in self._pools.items()})
        self.samples.append(
            ScalingSample(
                now_s,
                {name: pool.target for name, pool in self._pools.items()},
                {name: self._num_running(name) for name in self._pools},
            )
        )
        if not system.is_over:
            system.queue.at(now_s + _INTERVAL_S, Order.SAMPLE, 1, self._tick)

    def _num_running(self, pool: str) -> int:
        return len(self._system.pools[pool].table)

    def _ongoing(self, reports: Mapping[str, DemandReport]) -> dict[str, int]:
        """A call of decode lasts as long as its request; one of prefill until its prompt is computed."""
        num_held = sum(report.num_held for report in reports.values())
        prompts = (engine.scheduler for engine in self._system.prefills.values())
        at_prefill = sum(scheduler.num_running + scheduler.num_queued for scheduler in prompts)
        return {
            "decode": int(sum(report.num_open for report in reports.values())),
            "prefill": int(at_prefill + num_held),
        }

    def _mean_step_s(self) -> float:
        """Of the decode replicas, since the last look; 0.0 without a step."""
        means = []
        for name in self._system.pools["decode"].table:
            counts = self._system.decodes[name].counts
            busy_s, num_steps = self._stepped.get(name, (0.0, 0))
            if counts.num_steps > num_steps:
                means.append((counts.busy_s - busy_s) / (counts.num_steps - num_steps))
            self._stepped[name] = (counts.busy_s, counts.num_steps)
        return sum(means) / len(means) if means else 0.0

    def _follow(self, name: str, pool: _Pool, now_s: float) -> None:
        lives = [life for life in pool.lives if not life.retired]
        for _ in range(pool.target - len(lives)):
            life = _Life(now_s)
            pool.lives.append(life)
            self._system.queue.at(now_s + self._start_delay_s, Order.MESSAGE, 0, self._starter(name, life))
        # The youngest go, and those first that have not started.
        for life in lives[pool.target :]:
            life.retired = True
            if life.name is None:
                life.ended_s = now_s
            else:
                self._system.pools[name].retire(life.name)

    def _starter(self, pool: str, life: _Life) -> Action:
        def start(_: float) -> None:
            if not life.retired:
                life.name = self._system.add(pool)

        return start

    def _end_drained(self, now_s: float) -> None:
        for name, pool in self._pools.items():
            engines = self._system.pools[name].engines
            for life in pool.lives:
                if life.retired and life.ended_s is None and life.name and engines[life.name].is_idle:
                    life.ended_s = now_s
