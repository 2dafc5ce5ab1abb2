"""Renders the chart with real Helm code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from cluster.config.parts import OWN_PART_VARIABLE, with_live_part

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
FULL = Path(__file__).parent / "full.yaml"
MINIMAL: dict[str, Any] = {"config": {"layout": "colocated", "pools": {"prefill": None}}}


@dataclass(frozen=True, slots=True)
class Rendered:
    objects: list[dict[str, Any]]
    notes: str

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [found for found in self.objects if found["kind"] == kind]

    @property
    def service(self) -> dict[str, Any]:
        (found,) = self.of_kind("RayService")
        return found

    @property
    def cluster(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.service["spec"]["rayClusterConfig"]
        return spec

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        return {group["groupName"]: group for group in self.cluster["workerGroupSpecs"]}

    @property
    def serve_config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        return config

    @property
    def config(self) -> dict[str, Any]:
        """The SplitServe config that is deployed: its parts, put together."""
        (application,) = self.serve_config["applications"]
        ingress = application["deployments"][0]
        own = json.loads(ingress["ray_actor_options"]["runtime_env"]["env_vars"][OWN_PART_VARIABLE])
        values: dict[str, Any] = {**application["args"]["config"], **own}
        return with_live_part(values, ingress["user_config"])

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name of the group and pod template, the head first."""
        yield "head", self.cluster["headGroupSpec"]["template"]
        for name, group in self.groups.items():
            yield name, group["template"]


def render(values: Mapping[str, Any] | None = None, chart: Path = CHART, release: str = "splitserve") -> Rendered:
    """Raises helm_python.HelmError, as `helm install` would fail."""
    texts = _texts(json.dumps(values or {}), chart, release)
    notes = "".join(text for path, text in texts.items() if path.endswith("NOTES.txt"))
    documents = [
        doc for path, text in texts.items() if not path.endswith("NOTES.txt") for doc in yaml.safe_load_all(text)
    ]
    return Rendered([doc for doc in documents if doc is not None], notes)


@cache
def _texts(values: str, chart: Path, release: str) -> dict[str, str]:
    with helm_python.Chart.load(chart) as loaded:
        return loaded.render(json.loads(values), name=release, namespace="llm")


def read_values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes into values, as Helm merges maps."""
    result = dict(values)
    for key, value in changes.items():
        both_maps = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both_maps else value
    return result


ALL_VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "minimal": MINIMAL,
    "full": read_values(FULL),
    **{path.stem: read_values(path) for path in EXAMPLES},
}
