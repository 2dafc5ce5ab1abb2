"""Which replica a call goes to, and what becomes of one that cannot be reached. Serve's part of it is not made."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.routing.target_lost import ReplicaDied, ReplicaGone, ReplicaUnreachable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import


def _replica(name: str) -> Any:
    from ray.serve._private.common import DeploymentID, ReplicaID

    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("decode", "app")))


_PICKLE = """
import sys
from ray.serve.config import RequestRouterConfig
config = RequestRouterConfig(request_router_class="cluster.routing.target_router:TargetRouter")
sys.stdout.buffer.write(config._serialized_request_router_cls)
"""


@cache
def _as_ray_has_it() -> Any:
    """The class as it comes out of the deployment's options in another process: a copy, and so is what it refers to by
    the names of its module."""
    from ray import cloudpickle

    from cluster.routing.target_router import TargetRouter

    pickled = subprocess.run([sys.executable, "-c", _PICKLE], check=True, capture_output=True).stdout
    copied = cloudpickle.loads(pickled)
    assert copied is not TargetRouter
    return copied


def _router(*names: str) -> Any:
    from ray.serve._private.request_router.common import ReplicaQueueLengthCache

    router_class = _as_ray_has_it()
    router = router_class.__new__(router_class)
    router._replicas_list = [_replica(name) for name in names]
    router._replica_queue_len_cache = ReplicaQueueLengthCache()
    router._queue_len_gauge_last_update = {}
    router._unreachable, router._died = set(), deque(maxlen=3)
    router._replicas = {replica.replica_id: replica for replica in router._replicas_list}
    router._replica_id_set = set(router._replicas)
    router._colocated_replica_ids, router._multiplexed_model_id_to_replica_ids = {}, {}
    return router


def _call(target: str) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(session_id=target))


def _choose(router: Any, target: str, is_retry: bool = False) -> Any:
    return asyncio.run(router._choose_replica_for_request(_call(target), is_retry=is_retry))


def test_a_call_goes_to_the_replica_that_was_named() -> None:
    router = _router("a", "b")
    assert _choose(router, "b").replica_id.unique_id == "b"
    assert _choose(router, "a", is_retry=True).replica_id.unique_id == "a", "it was full, and may not be any more"


def test_one_that_is_not_there_is_said_to_be_gone() -> None:
    with pytest.raises(ReplicaGone, match="c is not in its pool"):
        _choose(_router("a"), "c")


def test_one_that_could_not_be_reached_is_not_tried_for_ever() -> None:
    router = _router("a", "b")
    router.on_replica_actor_unavailable(_replica("a").replica_id)
    assert _choose(router, "b", is_retry=True).replica_id.unique_id == "b"
    with pytest.raises(ReplicaUnreachable, match="a cannot be reached"):
        _choose(router, "a", is_retry=True)
    assert _choose(router, "a").replica_id.unique_id == "a", "the next call may find it"


def test_one_that_died_is_told_from_one_that_leaves() -> None:
    """Neither is on the list any more."""
    router = _router("a", "b", "c", "d", "e")
    router.on_replica_actor_died(_replica("a").replica_id)
    with pytest.raises(ReplicaDied, match="a has died"):
        _choose(router, "a")
    router._replicas_list = [replica for replica in router._replicas_list if replica.replica_id.unique_id != "b"]
    with pytest.raises(ReplicaGone, match="b is not in its pool"):
        _choose(router, "b")
    for name in ("c", "d", "e"):
        router.on_replica_actor_died(_replica(name).replica_id)
    with pytest.raises(ReplicaGone):  # those that died long ago are forgotten
        _choose(router, "a")
