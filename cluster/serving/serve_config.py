"""The config file of Ray Serve that runs a SplitServe config: what `serve deploy` takes, and a RayService's
serveConfigV2. One application; what concerns one deployment only lies with it (`cluster.config.parts`), so that a new
file restarts no more than it must.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from cluster.autoscaling.scaling_options import ingress_deployment, pool_deployment
from cluster.config.model import SourceKind
from cluster.config.parts import OWN_PART_VARIABLE, as_environment, live_part, shared_part, with_live_part
from cluster.config.root import Config
from cluster.user_error import ConfigError

APP_NAME = "splitserve"
IMPORT_PATH = "cluster.serving.serve_app:build"
POLICY_FUNCTION = "cluster.autoscaling.autoscaling_policy:decide"


def serve_config(values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """values: the config as it was written; config: the same, checked. Plain data. Raises ConfigError."""
    _check_paths(values, config)
    application: dict[str, Any] = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": shared_part(values)},
        "deployments": _deployments(values, config),
    }
    if config.autoscales:
        # Ray 2.60 takes it for a whole application, though its schema's text says not yet.
        application["autoscaling_policy"] = {"policy_function": POLICY_FUNCTION}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.server.host, "port": config.server.port},
        "logging_config": serve_logging(config),
        "applications": [application],
    }


def _deployments(values: Mapping[str, Any], config: Config) -> list[dict[str, Any]]:
    options = {"ingress": ingress_deployment(config) | {"user_config": live_part(values)}}
    options |= {name: pool_deployment(pool) for name, pool in config.pools.deployed().items()}
    for name, of in options.items():
        of["ray_actor_options"] |= {"runtime_env": {"env_vars": as_environment(values, name)}}
    return [{"name": name, **of} for name, of in options.items()]


def serve_logging(config: Config) -> dict[str, Any]:
    """Serve's own lines per request and per change say little that ours and the metrics do not."""
    encoding = "JSON" if config.logging.format == "json" else "TEXT"
    return {"log_level": "WARNING", "encoding": encoding, "enable_access_log": False}


def config_values(document: Any) -> dict[str, Any] | None:
    """The SplitServe config of a Serve config file, its parts put together; None if it is no such file."""
    try:
        (application,) = document["applications"]
        ingress = next(of for of in application["deployments"] if of["name"] == "ingress")
        own = json.loads(ingress["ray_actor_options"]["runtime_env"]["env_vars"][OWN_PART_VARIABLE])
        values = with_live_part(application["args"]["config"] | own, ingress["user_config"])
    except (KeyError, TypeError, ValueError, StopIteration):
        return None
    return values


def as_yaml(document: Mapping[str, Any], source: str) -> str:
    """For `serve deploy`. source: the file it was made from."""
    head = f"# Made by `splitserve deploy {source}`: change that file, not this one.\n"
    return head + yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=120)


def _check_paths(values: Mapping[str, Any], config: Config) -> None:
    """On the cluster a relative path would count from wherever Ray runs."""
    lines = [
        f"{key}: {path!r} is relative, and the cluster's machines know no folder that it counts from; give the path "
        "that it has there"
        for key, path in _paths(values, config, "")
        if not path.startswith(("/", "~"))
    ]
    if lines:
        raise ConfigError(*lines)


def _paths(values: Mapping[str, Any], section: BaseModel, above: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        checked = getattr(section, name)
        if isinstance(checked, BaseModel) and isinstance(value, Mapping):
            yield from _paths(value, checked, f"{above}{name}.")
        elif isinstance(checked, Path) or (above + name == "model.source" and _is_local(section)):
            yield f"{above}{name}", str(value)


def _is_local(model: BaseModel) -> bool:
    return getattr(model, "kind", None) in (SourceKind.FOLDER, SourceKind.GGUF)
