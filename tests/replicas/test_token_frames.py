"""What an engine's frames say beside tokens: how much of a prompt was found, once, before or with its first token."""

from __future__ import annotations

from typing import Any, cast

import pytest

from replicas.channels.token_sender import TokenSender
from replicas.engine.open_call import OpenCall, open_call
from replicas.engine.token_frames import TokenFrames
from replicas.messages import (
    CallStatus,
    ChannelAddress,
    EngineLoad,
    GenerateCall,
    GenerateReply,
    PrefillCall,
    PrefillReply,
    Token,
    TokenLogprobs,
    TransferPeer,
)
from scheduler.generation_spec import GenerationSpec
from scheduler.sampling_params import SamplingParams

LOAD = EngineLoad(1, 2, 3, 4, 5, 0.25)
SPEC = GenerationSpec(tuple(range(40)), (0, 1), 9, frozenset(), SamplingParams())
PEER = TransferPeer("r", "e", "agent", b"", "f", 1, 1)


class Sender:
    """In the place of a TokenSender: what was sent, by router."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[Any, ...]]] = []

    def send(self, router_id: str, load: EngineLoad, *items: Any) -> None:
        self.sent.append((router_id, items))

    def flush(self) -> None: ...

    def stalled_routers(self, now_s: float) -> list[str]:
        return []

    def take(self) -> list[tuple[str, Any, Any]]:
        """(router, tokens, cached) of each frame since the last time."""
        taken = [(router_id, items[1], items[3]) for router_id, items in self.sent]
        self.sent.clear()
        return taken


class Rig:
    def __init__(self) -> None:
        self.sender = Sender()
        self.frames = TokenFrames(cast("TokenSender", self.sender), 0.5)

    def flush(self) -> list[tuple[str, Any, Any]]:
        self.frames.flush(lambda: LOAD, 0.0, lambda *_: None)
        return self.sender.take()


def opened(request_id: str, num_cached: int, router_id: str = "router", is_read: bool = False) -> OpenCall:
    channel = ChannelAddress(router_id, "tcp://x", "key")
    call = open_call(GenerateCall(request_id, SPEC, 9.0, channel, PEER if is_read else None), 0.0)
    call.request.num_cached = num_cached
    return call


def token(request_id: str, choice: int, index: int) -> Token:
    return Token(request_id, choice, index, 7, None)


@pytest.mark.parametrize("first_index", [0, 1], ids=["computed here", "read"])
def test_it_leaves_with_the_first_token_and_never_again(first_index: int) -> None:
    rig, call = Rig(), opened("a", 32, is_read=first_index == 1)
    rig.frames.add_admitted(call)
    ((_, tokens, cached),) = rig.flush()
    assert (tokens, cached) == ((), ())
    firsts = tuple(token("a", choice, first_index) for choice in (0, 1))
    for first in firsts:
        rig.frames.add_token(call, first)
    assert rig.flush() == [("router", firsts, (("a", 32),))]
    rig.frames.add_token(call, token("a", 0, first_index + 1))
    ((_, _, cached),) = rig.flush()
    assert cached == ()


def test_who_found_nothing_costs_nothing() -> None:
    rig, call = Rig(), opened("a", 0)
    rig.frames.add_token(call, token("a", 0, 0))
    assert rig.flush() == [("router", (token("a", 0, 0),), ())]


def test_each_router_is_told_of_its_own() -> None:
    rig = Rig()
    for name, router_id, num_cached in (("a", "one", 16), ("b", "two", 32), ("c", "one", 0), ("d", "one", 48)):
        rig.frames.add_token(opened(name, num_cached, router_id), token(name, 0, 0))
    assert {router_id: cached for router_id, _, cached in rig.flush()} == {
        "one": (("a", 16), ("d", 48)),
        "two": (("b", 32),),
    }


def test_it_is_in_the_first_of_many_frames_of_a_step() -> None:
    rig, call = Rig(), opened("a", 16)
    top = TokenLogprobs(-0.5, tuple((number, -1.0) for number in range(20)))
    for index in range(600):
        rig.frames.add_token(call, Token("a", 0, index, 7, None, top))
    frames = rig.flush()
    assert len(frames) > 2
    assert [cached for _, _, cached in frames] == [(("a", 16),), *[()] * (len(frames) - 1)]


def test_replies_say_it_too() -> None:
    reply = opened("a", 32).generate_reply(CallStatus.OK, "")
    assert isinstance(reply, GenerateReply)
    assert reply.num_cached == 32
    prefill = open_call(PrefillCall("a", SPEC, 9.0, PEER), 0.0)
    prefill.request.num_cached = 16
    answer = prefill.prefill_reply(CallStatus.OK, "", LOAD)
    assert isinstance(answer, PrefillReply)
    assert answer.num_cached == 16
