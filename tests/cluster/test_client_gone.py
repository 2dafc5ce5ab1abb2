"""A client that went, as Ray Serve tells it: nothing is an error, and nothing of the request goes on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError, TaskCancelledError

from tests.cluster.fake_ingress import HANG, FakeIngress, ScriptedSource, text
from tests.cluster.test_http_disconnect import C, Connection, H, body_of

TOLD_BY = pytest.mark.parametrize("told_by", [TaskCancelledError(), ActorDiedError()], ids=["cancelled", "proxy died"])


class ServeConnection(Connection):
    """`receive` raises what the call to Serve's proxy ended with."""

    told_by: RayError = TaskCancelledError()

    async def _receive(self) -> dict[str, Any]:
        if self.incoming:
            return self.incoming.pop(0)
        await self.gone.wait()
        raise self.told_by


@TOLD_BY
@pytest.mark.parametrize("path", [C, H])
async def test_gone_in_the_middle_of_a_stream(path: str, told_by: RayError, caplog: pytest.LogCaptureFixture) -> None:
    ingress = FakeIngress(ScriptedSource(p=[*text(0, "ab"), HANG]))
    connection = ServeConnection(ingress, path, body_of(path, stream=True))
    connection.told_by = told_by
    while len(connection.sent) < 3:
        await asyncio.sleep(0)
    with caplog.at_level(logging.INFO):
        connection.gone.set()
        await connection.ended()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert "client gone" in caplog.text


@TOLD_BY
async def test_gone_while_it_sends_its_body(told_by: RayError, caplog: pytest.LogCaptureFixture) -> None:
    connection = ServeConnection(FakeIngress(ScriptedSource()), C, {})
    connection.told_by = told_by
    connection.incoming[:] = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}]
    connection.gone.set()
    await connection.ended()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_another_fault_of_receive_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    """Only Ray's own errors mean that."""

    class Broken(ServeConnection):
        async def _receive(self) -> dict[str, Any]:
            if self.incoming:
                return self.incoming.pop(0)
            raise ZeroDivisionError

    connection = Broken(FakeIngress(ScriptedSource(p=[*text(0, "ab"), HANG])), C, body_of(C, stream=True))
    await asyncio.wait({connection.task})
    assert connection.task.exception() is not None
