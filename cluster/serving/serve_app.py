"""The application builder that a Ray Serve config file names: `import_path: cluster.serving.serve_app:build`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.file import section_of
from cluster.config.serving import SharedConfig
from cluster.serving.app import build_shared_app
from cluster.user_error import ConfigError


def build(args: Mapping[str, Any]) -> Any:
    """The application of args["config"], the shared part of a SplitServe config. Raises ConfigError, all that is wrong.

    Files that the config names are looked for by the replicas, not here: this machine may not have them.
    """
    unknown = [name for name in args if name != "config"]
    if unknown or not isinstance(args.get("config"), Mapping):
        raise ConfigError(
            f"args: expected exactly the key config with a part of a SplitServe config, found {sorted(args)}"
        )
    return build_shared_app(section_of(SharedConfig, args["config"]), args["config"])
