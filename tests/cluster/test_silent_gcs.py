"""Ray's GCS does not answer: what asks it waits for that, and nothing else that an ingress does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray

from cluster.autoscaling import scaling_targets
from cluster.config.service import ServerConfig
from cluster.routing import actor_death
from cluster.routing.actor_death import has_died
from cluster.serving.serve_address import warn_if_elsewhere

PATIENCE_S = 120.0


async def targets() -> None:
    with pytest.raises(ValueError, match="no such actor"):
        await scaling_targets._targets("splitserve")


async def address() -> None:
    await warn_if_elsewhere(ServerConfig())


async def death() -> None:
    assert await has_died("SERVE_REPLICA::1")


@pytest.mark.parametrize("ask", [targets, address, death])
async def test_the_event_loop_goes_on(ask: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_death, "_ASK_S", PATIENCE_S)
    speaks = threading.Event()

    def silent(*_: Any, **__: Any) -> Any:
        assert speaks.wait(PATIENCE_S), "the loop stood still"
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", silent)
    asking = asyncio.create_task(ask())
    for _ in range(10):
        await asyncio.sleep(0.001)
        assert not asking.done(), "it did not wait"
    speaks.set()
    await asking
