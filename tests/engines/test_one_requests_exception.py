"""Whatever is raised for one request, wherever: its call is answered, others get the tokens that they get alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from replicas.messages import CallStatus, ChannelAddress, GenerateCall, GenerateReply, PrefillCall, PrefillReply
from scheduler.request import RequestState
from tests.engines.local_system import Generated, LocalSystem, collect
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings
from tests.golden.golden_set import Golden

PATIENCE_S = 120.0
BAD = "bad"
ABSENT = ChannelAddress(BAD, "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode())


@pytest.fixture(scope="module")
def system(tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    decode, prefill = (tiny_settings(pool, tiny_goldens.folder) for pool in ("decode", "prefill"))
    system = LocalSystem(decode, prefill)
    yield system
    system.close()


@pytest.fixture(scope="module")
def goldens(tiny_goldens: TinyGoldens) -> list[Golden]:
    return [tiny_goldens.of(num_tokens) for num_tokens in (15, 33)]


def raising(method: Callable[..., Any], is_bad: Callable[..., bool], hits: list[str]) -> Callable[..., Any]:
    """The method, but for a bad request: that raises what no caller expects."""

    def call(*arguments: Any, **options: Any) -> Any:
        if is_bad(*arguments, **options):
            hits.append(method.__name__)
            raise LookupError("a bug of ours")
        return method(*arguments, **options)

    return call


def of_id(request_id: str, *_: Any, **__: Any) -> bool:
    return request_id.startswith(BAD)


def of_request(request: Any, *_: Any) -> bool:
    return bool(request.request_id.startswith(BAD))


# where it raises: (engine, object, method, which calls are the bad request's)
PLACES: dict[str, tuple[str, Callable[[Any], Any], str, Callable[..., bool]]] = {
    "decode, channel": ("decode", lambda e: e.sender, "open", lambda address: address.router_id == BAD),
    "decode, submission": ("decode", lambda e: e.scheduler, "submit", of_request),
    "decode, admission": ("decode", lambda e: e.transfers, "expect", of_id),
    "decode, handoff": ("decode", lambda e: e.scheduler, "begin_load", of_id),
    "decode, KV is there": ("decode", lambda e: e.scheduler, "kv_ready", of_id),
    "decode, a token": ("decode", lambda e: e.calls, "_send_token", of_request),
    "prefill, submission": ("prefill", lambda e: e.scheduler, "submit", of_request),
    "prefill, offer": ("prefill", lambda e: e.transfers, "offer", of_id),
}


def calls(system: LocalSystem, golden: Golden) -> tuple[GenerateCall, PrefillCall]:
    """The bad request's, as a router makes them; that router takes no tokens."""
    assert system.prefill is not None
    generation = system.generation(golden.prompt_ids, 8)
    bad = f"{BAD}-{generation.generation_id}", generation.spec, PATIENCE_S
    return GenerateCall(*bad, ABSENT, system.prefill.peer), PrefillCall(*bad, system.decode.peer)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.01)


async def both_replies(system: LocalSystem, golden: Golden) -> tuple[GenerateReply, PrefillReply]:
    """Of the bad request, which decode waits with until it is cancelled, if nothing else has ended it."""
    assert system.prefill is not None
    decode, prefill = system.decode.engine, system.prefill.engine
    generate, prompt = calls(system, golden)
    request_id = generate.request_id
    generated = decode.generate(generate)

    def is_admitted() -> bool:
        opened = decode.calls.by_id.get(request_id)
        return generated.done() or (opened is not None and RequestState.ADMITTED in opened.request.entered_s)

    await until(is_admitted)
    prefilled = prefill.prefill(prompt)
    await until(prefilled.done)
    if prefilled.result().status is not CallStatus.OK:
        decode.cancel(request_id)
    await until(generated.done)
    return generated.result(), prefilled.result()


@pytest.mark.parametrize("place", PLACES)
def test_it_costs_that_request_only(
    system: LocalSystem, goldens: list[Golden], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, owner_of, name, is_bad = PLACES[place]
    built = system.decode if pool == "decode" else system.prefill
    assert built is not None
    owner, hits = owner_of(built.engine), list[str]()
    monkeypatch.setattr(owner, name, raising(getattr(owner, name), is_bad, hits))

    async def run() -> tuple[list[Generated], GenerateReply, PrefillReply]:
        router = await system.start_router(max_retries=0)
        try:
            others = [asyncio.create_task(collect(router, system.generation(g.prompt_ids, 48))) for g in goldens]
            generated, prefilled = await both_replies(system, goldens[0])
            results = await asyncio.gather(*others)
            await system.wait_for_baseline()
            return results, generated, prefilled
        finally:
            await router.stop()

    results, generated, prefilled = asyncio.run(run())
    assert hits
    reply = generated if pool == "decode" else prefilled
    assert (reply.status, reply.detail) == (CallStatus.ERROR, "LookupError: a bug of ours")
    for golden, result in zip(goldens, results, strict=True):
        assert result.token_ids == {0: golden.output_ids[:48]}
    assert all(engine.engine.is_healthy(PATIENCE_S) for engine in system.engines)
