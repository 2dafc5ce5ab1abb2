"""The policy inside Ray's own code: the classes of Serve's controller that ask an application's policy and apply it.

Ray's schema says that a policy of a whole application is not supported yet, though 2.60 has it: this is where we notice
if that changes. No Ray process is started.
"""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import AutoscalingStateManager
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.autoscaling import autoscaling_policy
from cluster.autoscaling.scaling_options import ingress_deployment, pool_deployment
from cluster.autoscaling.scaling_rules import scaling_rules
from cluster.config.file import config_of
from cluster.config.root import Config
from cluster.routing.demand_report import DemandReport, HeardFigures
from cluster.serving.serve_config import POLICY_FUNCTION

UP_S, DOWN_S, ZERO_S = 5.0, 40.0, 20.0
SCALING = {"min_replicas": 0, "max_replicas": 6, "upscale_delay_s": UP_S, "downscale_delay_s": DOWN_S}
POOL = {
    "kv_capacity_tokens": 4096,
    "autoscaling": SCALING | {"downscale_to_zero_delay_s": ZERO_S, "initial_replicas": 1},
}
HEARD = HeardFigures(replica_blocks=256, prefill_tokens_per_s=1000.0)
IDLE = DemandReport(0, 0, 0, 0, 0, 0, HEARD)
PROMPTS = DemandReport(9, 0, 17_500, 17_500, 0, 0, HEARD)  # 3.5 prefill replicas
STREAMS = DemandReport(50, 0, 0, 0, 0, 0, HeardFigures(700, 256, 50, 0.02, 1000.0))  # 3.4 decode replicas


class Controller:
    """Serve's controller as far as it scales: Ray's state manager, and targets that are followed at once."""

    def __init__(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = time.time()
        monkeypatch.setattr(time, "time", lambda: self.now_s)
        self.manager, self.targets = AutoscalingStateManager(), {}
        self.rules = scaling_rules(config)
        self.manager.register_application("app", AutoscalingPolicy(policy_function=POLICY_FUNCTION))
        options = {name: pool_deployment(pool) for name, pool in config.pools.deployed().items()}
        for name, chosen in (options | {"ingress": ingress_deployment(config)}).items():
            if "autoscaling_config" in chosen:
                key = DeploymentID(name, "app")
                scaling = AutoscalingConfig(**chosen["autoscaling_config"])
                info = _info(name, scaling)
                self.targets[name] = self.manager.register_deployment(key, info, 1)
                self._run_replicas(name)

    def _run_replicas(self, name: str) -> None:
        key = DeploymentID(name, "app")
        replicas = [ReplicaID(f"{name}{index}", key) for index in range(self.targets[name])]
        self.manager.update_running_replica_ids(key, replicas)

    def report(self, demand: DemandReport) -> None:
        """As an ingress replica pushes what `record_autoscaling_stats` returned."""
        stats = demand.to_stats() | self.rules.to_stats()
        replica = ReplicaID("ingress0", DeploymentID("ingress", "app"))
        series: dict[Any, Any] = {name: [TimeStampedValue(self.now_s, value)] for name, value in stats.items()}
        self.manager.record_request_metrics_for_replica(ReplicaMetricReport(replica, series, self.now_s))

    def run(self, seconds: float, demand: DemandReport | None) -> None:
        for _ in range(round(seconds * 10)):
            if demand is not None:
                self.report(demand)
            wanted = {DeploymentID(name, "app"): count for name, count in self.targets.items()}
            decided = self.manager.get_decision_num_replicas("app", wanted)
            self.targets = {key.name: count for key, count in decided.items()}
            for name in self.targets:
                self._run_replicas(name)
            self.now_s += 0.1


def _info(name: str, scaling: AutoscalingConfig) -> DeploymentInfo:
    return DeploymentInfo(
        deployment_config=DeploymentConfig(autoscaling_config=scaling),
        replica_config=ReplicaConfig.create(lambda: None),
        start_time_ms=0,
        deployer_job_id="",
    )


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(config_of({"pools": {"prefill": POOL, "decode": POOL}}), monkeypatch)


def test_each_pool_grows_shrinks_and_starts_again_for_its_own_work(controller: Controller) -> None:
    controller.run(2, PROMPTS)
    assert controller.targets == {"prefill": 1, "decode": 1, "ingress": 1}
    controller.run(UP_S, PROMPTS)
    assert controller.targets == {"prefill": 4, "decode": 1, "ingress": 1}
    controller.run(UP_S + 2, STREAMS)
    assert controller.targets == {"prefill": 4, "decode": 4, "ingress": 1}
    controller.run(DOWN_S, STREAMS)
    assert controller.targets == {"prefill": 0, "decode": 4, "ingress": 1}  # without work for 40 s
    controller.run(DOWN_S + 2, IDLE)
    assert controller.targets == {"prefill": 0, "decode": 0, "ingress": 1}
    controller.run(60, IDLE)
    assert controller.targets == {"prefill": 0, "decode": 0, "ingress": 1}
    controller.run(1, DemandReport(1, 0, 500, 500, 30, 1))
    assert controller.targets == {"prefill": 1, "decode": 1, "ingress": 1}


def test_nothing_changes_while_no_ingress_reports(controller: Controller) -> None:
    controller.targets["decode"] = 3
    controller.run(300, None)
    assert controller.targets == {"prefill": 1, "decode": 3, "ingress": 1}


def test_an_error_is_logged_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoscaling_policy, "decide_replicas", lambda *_: 1 / 0)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    # Serve takes the policy, and with it the broken function, when it is told of it.
    controller = Controller(config_of({"pools": {"prefill": POOL, "decode": POOL}}), monkeypatch)
    controller.run(30, PROMPTS)
    assert controller.targets == {"prefill": 1, "decode": 1, "ingress": 1}
    assert "no decision was taken" in caplog.text


def test_a_pool_that_does_not_scale_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"kv_capacity_tokens": 4096, "replicas": 2}
    controller = Controller(config_of({"pools": {"prefill": fixed, "decode": POOL}}), monkeypatch)
    controller.run(UP_S + 2, STREAMS)
    assert controller.targets == {"decode": 4, "ingress": 1}


def test_a_part_of_a_report_is_not_taken_for_the_whole() -> None:
    metrics = {"num_open": {ReplicaID("a", DeploymentID("ingress", "app")): [TimeStampedValue(0.0, 3.0)]}}
    assert autoscaling_policy.latest_reports(SimpleNamespace(raw_metrics=metrics)) == {}


def test_serve_carries_the_policy_to_its_controller_by_value() -> None:
    """As its build task does, for a controller that has the packages on its path."""
    from ray import cloudpickle
    from ray.serve._private.utils import import_attr

    cloudpickle.register_pickle_by_value(autoscaling_policy)
    try:
        carried = cloudpickle.loads(cloudpickle.dumps(import_attr(POLICY_FUNCTION)))
    finally:
        cloudpickle.unregister_pickle_by_value(autoscaling_policy)
    assert carried is not autoscaling_policy.decide
    assert carried({}) == ({}, {})
