"""Ray's GCS does not answer: what asks it waits for that, and nothing else that an ingress does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray

from cluster.autoscaling import scaling_targets
from cluster.config.service import ServerConfig
from cluster.routing.actor_death import has_died
from cluster.serving.serve_address import warn_if_elsewhere

SILENT_S = 0.5


async def targets() -> None:
    with pytest.raises(ValueError, match="no such actor"):
        await scaling_targets._targets("splitserve")


async def address() -> None:
    await warn_if_elsewhere(ServerConfig())


async def death() -> None:
    assert await has_died("SERVE_REPLICA::1")


@pytest.mark.parametrize("ask", [targets, address, death])
async def test_the_event_loop_goes_on(ask: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **__: Any) -> Any:
        time.sleep(SILENT_S)
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", silent)
    asking = asyncio.create_task(ask())
    num_turns = 0
    while not asking.done():
        await asyncio.sleep(SILENT_S / 50)
        num_turns += 1
    await asking
    assert num_turns > 5, "the loop stood still"
