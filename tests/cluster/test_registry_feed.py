"""What Serve says of a pool's replicas reaches the registry. Serve's part of it is not made."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.routing import replica_registry

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import

_PICKLE = """
import sys
from ray.serve.config import RequestRouterConfig
config = RequestRouterConfig(request_router_class="cluster.routing.registry_feed:RegistryFeed")
sys.stdout.buffer.write(config._serialized_request_router_cls)
"""


def _as_ray_has_it() -> Any:
    """The class as it comes out of the deployment's options in another process: a copy, and so is what it refers to by
    the names of its module."""
    from ray import cloudpickle

    from cluster.routing.registry_feed import RegistryFeed

    pickled = subprocess.run([sys.executable, "-c", _PICKLE], check=True, capture_output=True).stdout
    copied = cloudpickle.loads(pickled)
    assert copied is not RegistryFeed
    return copied


def test_the_copy_that_ray_makes_feeds_the_one_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

    heard_by_serve: list[list[Any]] = []
    monkeypatch.setattr(
        PowerOfTwoChoicesRequestRouter, "update_replicas", lambda _, replicas: heard_by_serve.append(replicas)
    )
    registry = replica_registry.ReplicaRegistry()
    monkeypatch.setattr(replica_registry, "REGISTRY", registry)
    feed_class = _as_ray_has_it()
    feed = feed_class.__new__(feed_class)
    pool = DeploymentID("decode", "app")
    feed._deployment_id = pool
    running = [SimpleNamespace(replica_id=ReplicaID(name, pool), replica_metadata={"of": name}) for name in ("a", "b")]
    feed.update_replicas(running)
    assert registry.replicas("decode") == {"a": {"of": "a"}, "b": {"of": "b"}}
    feed.update_replicas(running[1:])
    assert registry.replicas("decode") == {"b": {"of": "b"}}
    assert heard_by_serve == [running, running[1:]]
