"""Whose frames an ingress takes: those of the decode pool as it is, and of who left with our work in hand."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.routing.frame_intake import FrameIntake
from cluster.routing.mailboxes import Mailboxes
from cluster.routing.pool_client import PoolClient
from cluster.routing.replica_registry import ReplicaTable
from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.token_sender import TokenSender
from replicas.messages import EngineLoad, Frame


class _NoPool(PoolClient):
    def replicas(self) -> ReplicaTable:
        return {}

    async def submit(self, replica_id: str, call: Any) -> Any:
        raise AssertionError("nobody is called")

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        raise AssertionError("nobody is called")


def _table(*replica_ids: str) -> ReplicaTable:
    return {
        replica_id: {"channel_public_key": f"key of {replica_id}", "peer": {"epoch": f"epoch of {replica_id}"}}
        for replica_id in replica_ids
    }


def _keys(receiver: TokenReceiver) -> set[str]:
    return set(receiver._allowed.keys)


async def test_a_replica_that_left_is_shut_out_when_it_has_nothing_of_ours() -> None:
    mailboxes = Mailboxes()
    intake = FrameIntake(
        "r", "127.0.0.1", _NoPool(), mailboxes, on_frame=lambda _: None, on_gap=lambda: None, replay_timeout_s=1.0
    )
    intake.admit(_table("a", "b"))
    assert _keys(intake.receiver) == {"key of a", "key of b"}
    mailboxes.open("request", "a")
    intake.admit(_table("c"))
    assert _keys(intake.receiver) == {"key of a", "key of c"}  # a drains
    mailboxes.close("request")
    intake.admit(_table("c"))
    assert _keys(intake.receiver) == {"key of c"}
    frame = Frame("a", "epoch of a", 0, EngineLoad(0, 0, 0, 1, 1, 0.0), (), (), (), (), ())
    intake.receiver.deliver_replayed([frame])
    assert intake.receiver.counts.forgotten == 1


async def test_a_replica_that_comes_back_is_heard_again() -> None:
    """Serve takes one off the table while it gives it new options, and puts it back a moment later."""
    heard: list[Frame] = []
    intake = FrameIntake(
        "r", "127.0.0.1", _NoPool(), Mailboxes(), on_frame=heard.append, on_gap=lambda: None, replay_timeout_s=1.0
    )
    await intake.receiver.start()
    sender = TokenSender("a", "e")
    table = {"a": {"channel_public_key": sender.public_key, "peer": {"epoch": "e"}}}
    try:
        for decodes in (table, {}, table, {}, table):
            intake.admit(decodes)
        sender.open(intake.address)
        deadline_s = asyncio.get_running_loop().time() + 120
        while len(heard) < 2:
            assert asyncio.get_running_loop().time() < deadline_s, "no frame has come"
            sender.send("r", EngineLoad(0, 0, 0, 1, 1, 0.0), (), (), ())
            sender.flush()
            await asyncio.sleep(0.05)
        intake.admit({})
        intake.admit(table)
        num_before = len(heard)
        while len(heard) == num_before:
            assert asyncio.get_running_loop().time() < deadline_s, "no frame has come since it is back"
            sender.send("r", EngineLoad(0, 0, 0, 1, 1, 0.0), (), (), ())
            sender.flush()
            await asyncio.sleep(0.05)
    finally:
        sender.shut_down()
        await intake.receiver.stop()
