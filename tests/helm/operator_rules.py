"""What the KubeRay operator refuses and the CRD does not: its checks of a RayService (KubeRay v1.7.0) as a function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_STRATEGIES = ("NewCluster", "None", "NewClusterWithIncrementalUpgrade")
_MAX_NAME = 47
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_RAY_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def violations(service: dict[str, Any]) -> list[str]:
    """A sentence for each rule that the RayService breaks."""
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    return [
        *_name(service["metadata"]["name"]),
        *_upgrade(spec, cluster),
        *_groups(cluster),
        *_autoscaler(cluster),
        *_fault_tolerance(cluster),
        *_auth(cluster),
    ]


def _name(name: str) -> Iterator[str]:
    if len(name) > _MAX_NAME:
        yield f"name has more than {_MAX_NAME} characters"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield "name is no DNS-1035 label"


def _upgrade(spec: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in _STRATEGIES:
        yield f"upgradeStrategy.type {kind} is none of {_STRATEGIES}"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions")
    if not cluster.get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs the autoscaler"
    if options is None:
        yield "an incremental upgrade needs clusterUpgradeOptions"
        return
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", -1)
    if not 0 <= surge <= 100 or not 0 <= step <= 100:
        yield "maxSurgePercent and stepSizePercent must be 0 to 100"
    if step > surge:
        yield "stepSizePercent is more than maxSurgePercent"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds must be positive"
    if not options.get("gatewayClassName"):
        yield "gatewayClassName is missing"


def _groups(cluster: dict[str, Any]) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    if head.get("headService", {}).get("metadata", {}).get("name"):
        yield "headService.metadata.name must be unset"
    for group in [head, *cluster.get("workerGroupSpecs", [])]:
        name, start = group.get("groupName", "head"), group.get("rayStartParams", {})
        if not group["template"]["spec"].get("containers"):
            yield f"{name} has no container"
        if "labels" in start:
            yield f"{name}: labels belong in the group, not in rayStartParams"
        if group.get("resources") and any(start.get(key) for key in _RAY_RESOURCES):
            yield f"{name}: resources both in rayStartParams and in resources"
        for key, value in group.get("labels", {}).items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                yield f"{name}: {key}={value} is no label"
    for group in cluster.get("workerGroupSpecs", []):
        least, most = group.get("minReplicas"), group.get("maxReplicas")
        if least is None or most is None:
            yield f"{group['groupName']}: minReplicas and maxReplicas are needed"
        elif not 0 <= least <= most or group.get("replicas", 0) < 0:
            yield f"{group['groupName']}: minReplicas {least} to maxReplicas {most} is no range"


def _autoscaler(cluster: dict[str, Any]) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    env = {entry["name"]: entry.get("value") for entry in head["template"]["spec"]["containers"][0].get("env", [])}
    version = cluster.get("autoscalerOptions", {}).get("version")
    is_on = cluster.get("enableInTreeAutoscaling", False)
    if not is_on and env.get("RAY_enable_autoscaler_v2") in ("1", "true"):
        yield "RAY_enable_autoscaler_v2 without enableInTreeAutoscaling"
    if is_on and version and "RAY_enable_autoscaler_v2" in env:
        yield "both autoscalerOptions.version and RAY_enable_autoscaler_v2"
    if is_on and version == "v2":
        for group in [head, *cluster.get("workerGroupSpecs", [])]:
            if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                yield f"{group.get('groupName', 'head')}: restartPolicy must be Never with autoscaler v2"


def _fault_tolerance(cluster: dict[str, Any]) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    env = {entry["name"] for entry in head["template"]["spec"]["containers"][0].get("env", [])}
    start = head.get("rayStartParams", {})
    if "gcsFaultToleranceOptions" in cluster:
        if start.get("redis-password") or env & {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}:
            yield "Redis is configured beside gcsFaultToleranceOptions too"
    elif "RAY_REDIS_ADDRESS" in env:
        yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
    if start.get("redis-username") or "REDIS_USERNAME" in env:
        yield "the Redis user belongs in gcsFaultToleranceOptions"


def _auth(cluster: dict[str, Any]) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("mode") != "token":
        return
    if options.get("enableK8sTokenAuth"):
        yield "a RayService does not support Kubernetes tokens"
    version = cluster.get("rayVersion", "")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or tuple(map(int, version.split("."))) < (2, 52, 0):
        yield f"token authentication needs rayVersion 2.52.0 or newer, not {version!r}"
