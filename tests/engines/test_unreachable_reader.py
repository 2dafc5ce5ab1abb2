"""A prefill engine whose reader it cannot reach: the router is told so at once, and does not wait for a handoff."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.api_error import ApiError
from replicas.engine.engine import Engine
from replicas.kv.handoff_actions import ReaderChecked
from replicas.kv.nixl_address import NixlAddress
from replicas.kv.transfer_thread import TransferThread
from replicas.messages import CallStatus, GenerationSpec, PrefillCall, PrefillReply, TransferPeer
from replicas.settings import FaultSettings
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import LocalSystem, touch
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

WAIT_S = 120.0
HANDOFF_S = 240.0  # what the router would wait for one


@pytest.fixture(scope="module")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def system(tiny_goldens: TinyGoldens, fault_dir: Path) -> Iterator[LocalSystem]:
    testing = FaultSettings(str(fault_dir))
    changes = {"testing": testing, "has_prefix_cache": False}  # the same prompt is computed several times
    decode, prefill = (tiny_settings(pool, tiny_goldens.folder, **changes) for pool in ("decode", "prefill"))
    system = LocalSystem(decode, prefill)
    yield system
    system.close()


def nobody(system: LocalSystem) -> TransferPeer:
    """A reader whose metadata NIXL cannot use."""
    address = replace(NixlAddress.decode(system.decode.peer.address), agent_metadata=b"junk")
    return replace(system.decode.peer, agent_name="nobody-1", address=address.encode())


def engine_of(system: LocalSystem) -> Engine:
    assert system.prefill is not None
    return system.prefill.engine


def prefill(system: LocalSystem, name: str, reader: TransferPeer, max_tokens: int = 4) -> Future[PrefillReply]:
    generation = GenerationSpec((7,) * 40, (0,), max_tokens, frozenset(), SamplingParams(temperature=0.0))
    return engine_of(system).prefill(PrefillCall(name, generation, WAIT_S, reader))


def test_the_router_does_not_wait_for_a_handoff_that_never_comes(
    system: LocalSystem, tiny_goldens: TinyGoldens
) -> None:
    golden = tiny_goldens.of(33)
    known = system.decode.peer
    system.decode.peer = nobody(system)
    began_s = time.monotonic()
    try:
        with pytest.raises(ApiError) as caught:
            system.run([system.generation(golden.prompt_ids, 16)], handoff_s=HANDOFF_S, max_retries=0)
    finally:
        system.decode.peer = known
    assert time.monotonic() - began_s < HANDOFF_S / 2
    assert caught.value.status == 500
    assert engine_of(system).transfers.snapshot().errors["unreachable"] >= 1
    asyncio.run(system.wait_for_baseline())
    (got,) = system.run([system.generation(golden.prompt_ids, 16)])
    assert got.token_ids[0] == golden.output_ids[:16]


def test_it_is_told_before_the_prompt_is_computed(system: LocalSystem, fault_dir: Path) -> None:
    touch(fault_dir, "hold.prefill.step")
    try:
        reply = prefill(system, "early", nobody(system)).result(WAIT_S)
    finally:
        (fault_dir / "hold.prefill.step").unlink()
    assert reply.status is CallStatus.KV_LOST
    assert reply.status.may_retry
    assert not reply.first_tokens
    assert "metadata of nobody-1 is unusable" in reply.detail
    asyncio.run(system.wait_for_baseline())


def test_who_needs_no_handoff_needs_no_reader(system: LocalSystem) -> None:
    reply = prefill(system, "one token", nobody(system), max_tokens=1).result(WAIT_S)
    assert (reply.status, len(reply.first_tokens)) == (CallStatus.OK, 1)
    asyncio.run(system.wait_for_baseline())


@pytest.mark.parametrize("problem", ["", "its connection is broken"])
def test_a_prompt_that_is_computed_first_is_answered_once_its_reader_is_known(
    system: LocalSystem, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    engine = engine_of(system)
    asked: list[str] = []
    monkeypatch.setattr(TransferThread, "check_reader", lambda _, transfer_id, reader: asked.append(transfer_id))
    before = engine.steps.num_prefilled_tokens
    reply = prefill(system, f"slow{problem}", system.decode.peer)
    deadline_s = time.monotonic() + WAIT_S
    while engine.steps.num_prefilled_tokens < before + 40 or not engine.status.ledger.is_idle:
        assert time.monotonic() < deadline_s  # decode, which waits for nothing, drops what it is offered
        time.sleep(0.01)
    assert asked == [f"slow{problem}"]
    assert not reply.done()
    engine.on_transfer_event(ReaderChecked(asked[0], problem))
    assert reply.result(WAIT_S).status is (CallStatus.KV_LOST if problem else CallStatus.OK)
    assert len(reply.result().first_tokens) == (0 if problem else 1)
    asyncio.run(system.wait_for_baseline())


def test_a_call_that_is_cancelled_while_it_waits_for_that_is_answered(
    system: LocalSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(system)
    monkeypatch.setattr(TransferThread, "check_reader", lambda _, transfer_id, reader: None)
    before = engine.steps.num_prefilled_tokens
    reply = prefill(system, "cancelled", system.decode.peer)
    deadline_s = time.monotonic() + WAIT_S
    while engine.steps.num_prefilled_tokens < before + 40:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    engine.cancel("cancelled")
    assert reply.result(WAIT_S).status is CallStatus.CANCELLED
    engine.on_transfer_event(ReaderChecked("cancelled"))
    asyncio.run(system.wait_for_baseline())
