"""The config cut up by deployment, so that a change restarts only the deployments that it concerns.

Ray Serve restarts all deployments of an application when its `args` change (their hash is the version of each), and one
alone when its own actor options do. So `args` have what all of them go by, and what is a deployment's own lies in an
environment variable of its replicas. Numbers of replicas are Serve's options, and an ingress is told of the pools while
it runs (`user_config`): neither restarts anything. Pure, but for the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from cluster.config.serving import ServingConfig, SharedConfig
from cluster.user_error import ConfigError

OWN_PART_VARIABLE = "SPLITSERVE_DEPLOYMENT_CONFIG"
# Of a pool or the ingress: these become options of its deployment.
_SERVE_KEYS = ("replicas", "autoscaling", "num_cpus", "num_gpus", "node_labels")

Values = Mapping[str, Any]


def shared_part(values: Values) -> dict[str, Any]:
    """For `args`. A change restarts every deployment."""
    return _picked(values, SharedConfig.model_fields)


def own_part(values: Values, deployment: str) -> dict[str, Any]:
    """What only this deployment goes by: "ingress", or a pool. A change restarts it."""
    if deployment != "ingress":
        return _without(values["pools"][deployment], _SERVE_KEYS)
    sections = _picked(values, ServingConfig.model_fields.keys() - SharedConfig.model_fields.keys())
    ingress = _without(sections.pop("ingress", {}), _SERVE_KEYS)
    return sections | ({"ingress": ingress} if ingress else {})


def live_part(values: Values) -> dict[str, Any]:
    """What an ingress learns while it runs: the pools, and by what it scales itself."""
    return {"pools": values["pools"], "ingress": _picked(values.get("ingress", {}), _SERVE_KEYS)}


def with_live_part(values: Values, live: Values) -> dict[str, Any]:
    """An ingress's values, with what it was told last. live: as of `live_part`."""
    ingress = _without(values.get("ingress", {}), _SERVE_KEYS) | live["ingress"]
    return {**values, "pools": live["pools"], "ingress": ingress}


def as_environment(values: Values, deployment: str) -> dict[str, str]:
    """The variable for this deployment's replicas."""
    text = json.dumps(own_part(values, deployment), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return {OWN_PART_VARIABLE: text}


def own_part_here() -> dict[str, Any]:
    """What this process's deployment was given. Raises ConfigError."""
    try:
        values = json.loads(os.environ[OWN_PART_VARIABLE])
    except KeyError:
        raise ConfigError(
            f"{OWN_PART_VARIABLE} is not set for this replica: a Serve config has it under deployments; make the file "
            "anew with `splitserve deploy`"
        ) from None
    assert isinstance(values, dict)
    return values


def _picked(values: Values, names: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _without(values: Values, names: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
