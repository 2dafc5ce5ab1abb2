"""Python packages that a config needs on the machine that serves it. Looked for, not imported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from cluster.config.root import Config
from cluster.launch.fit import Finding


def missing_packages(config: Config) -> Iterator[Finding]:
    for package, distribution, why in _needed(config):
        if find_spec(package) is None:
            yield Finding(
                f"{why} needs the Python package {distribution}, which is not installed: run make setup, or pip "
                f"install {distribution}"
            )


def _needed(config: Config) -> Iterator[tuple[str, str, str]]:
    """Module, distribution, and the key that needs it."""
    for pool in config.pools.deployed():
        yield "torch", "torch", f"pools.{pool}"
        break
    if config.layout == "split" and config.transfer.backend == "UCX":
        yield "nixl_cu13", "nixl-cu13", "layout: split, which moves KV by NIXL,"
