"""What the router knows of the replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.policies.routing_policy import DecodeCandidate, PrefillCandidate
from cluster.routing.pool_view import PoolView
from cluster.routing.replica_registry import ReplicaRegistry, ReplicaTable
from replicas.messages import (
    EngineLoad,
    Frame,
    TransferPeer,
)


def metadata(replica_id: str) -> dict[str, Any]:
    peer = TransferPeer(replica_id, "e", f"agent-{replica_id}", b"\x00m", "", 100, 1)
    return {"num_blocks": 100, "peer": peer.to_metadata()}


def load(free: int = 100, queued: int = 0, tokens: int = 0, **more: Any) -> EngineLoad:
    return EngineLoad(1, queued, tokens, free, 100, 0.0, **more)


def frame(replica_id: str, of: EngineLoad) -> Frame:
    return Frame(replica_id, "e", 0, of, (), (), (), (), ())


class Pools:
    def __init__(self) -> None:
        self.decodes = {"d": metadata("d")}
        self.prefills = {"p": metadata("p")}
        self.now_s = 50.0
        self.view = PoolView(lambda: self.decodes, lambda: self.prefills, lambda: self.now_s)

    @property
    def decode(self) -> DecodeCandidate:
        (candidate,) = self.view.decode_candidates()
        return candidate

    @property
    def room(self) -> DecodeCandidate:
        """What counts for its memory."""
        return self.decode._replace(num_rows=0, queued_tokens=0, tokens_per_s=0.0, step_tokens=0, block_bytes=0)

    @property
    def prefill(self) -> PrefillCandidate:
        (candidate,) = self.view.prefill_candidates()
        return candidate


def test_room_is_what_was_heard_less_what_was_sent_since() -> None:
    pools = Pools()
    assert pools.room == DecodeCandidate("d", 100, 100, 0, 0), "nothing heard: all of it"
    pools.view.heard(frame("d", load(free=60, queued=2)))
    assert pools.room == DecodeCandidate("d", 100, 60, 0, 2)
    pools.view.sent("d", 50, must_wait=False)
    pools.view.sent("d", 30, must_wait=True)
    assert pools.room == DecodeCandidate("d", 100, -20, 2, 2)
    assert pools.view.num_waiting == 1
    pools.view.heard(frame("d", load(free=10)))
    pools.view.admitted("d", 50, must_wait=False)
    assert pools.room == DecodeCandidate("d", 100, -20, 2, 0)
    pools.view.ended("d")
    pools.view.admitted("d", 30, must_wait=True)
    pools.view.ended("d")
    assert pools.room == DecodeCandidate("d", 100, 10, 0, 0)
    assert pools.view.num_waiting == 0


def test_the_queue_at_prefill_is_what_it_says_and_what_we_sent_since() -> None:
    """Others send there too: to count the larger of both would be to count our own for nothing beside theirs."""
    pools = Pools()
    pools.view.prompt_sent("p", 70)
    assert pools.prefill.queued_tokens == 70
    pools.view.heard_load("p", load(tokens=90))
    assert pools.prefill.queued_tokens == 90
    pools.view.prompt_sent("p", 50)
    assert pools.prefill.queued_tokens == 140
    pools.view.heard_load("p", load(tokens=60))
    assert pools.prefill.queued_tokens == 120, "never less than ours"
    pools.view.heard_load("p", load(tokens=90))
    for num_tokens in (70, 50):
        pools.view.prompt_answered("p", num_tokens)
    assert pools.prefill.queued_tokens == 90


def test_what_decode_projects_is_passed_on_less_what_was_sent_since() -> None:
    pools = Pools()
    pools.view.heard(frame("d", load(free=60, later_free_blocks=(70, 80), expected_tokens=30)))
    pools.view.sent("d", 50, must_wait=False)
    assert pools.room == DecodeCandidate("d", 100, 10, 1, 0, (20, 30), 30, 0.0)


def test_candidates_say_on_which_node_they_are() -> None:
    table = {"x": metadata("d") | {"node_id": "n1"}}
    view = PoolView(lambda: table, lambda: table)
    for _ in range(2):  # before and after they are heard
        assert [candidate.node_id for candidate in view.decode_candidates() + view.prefill_candidates()] == ["n1"] * 2
        view.heard_load("x", load())


def test_prefill_works_off_what_waits_there_while_nothing_is_heard_but_not_what_we_wait_for() -> None:
    pools = Pools()
    pools.view.heard_load("p", load(tokens=90, prefill_tokens_per_s=10.0))
    assert pools.prefill == PrefillCandidate("p", 100, 90, 10.0)
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 50
    pools.view.prompt_sent("p", 30)
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 40
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 30
    pools.view.prompt_answered("p", 30)
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 0


def test_a_prompt_counts_at_prefill_from_when_it_is_routed_there() -> None:
    """Else all that come until decode has admitted the first one would follow it."""
    pools = Pools()
    pools.view.prompt_coming("p", 30)
    pools.view.prompt_coming("p", 5)
    assert (pools.prefill.queued_tokens, pools.view.sent_prompt_tokens) == (35, 0)
    pools.view.heard_load("p", load(tokens=90))
    assert pools.prefill.queued_tokens == 125
    pools.view.prompt_came("p", 30)
    pools.view.prompt_sent("p", 30)
    assert (pools.prefill.queued_tokens, pools.view.sent_prompt_tokens) == (125, 30)
    pools.view.prompt_came("p", 5)
    assert pools.prefill.queued_tokens == 120


TWICE: dict[str, Callable[[PoolView], None]] = {
    "admitted": lambda view: view.admitted("d", 5, must_wait=True),
    "came": lambda view: view.prompt_came("p", 5),
    "answered": lambda view: view.prompt_answered("p", 5),
    "ended": lambda view: view.ended("d"),
}


@pytest.mark.parametrize("call", TWICE)
def test_counting_down_twice_is_our_bug_and_noticed(call: str) -> None:
    view = Pools().view
    view.sent("d", 5, must_wait=True)
    view.prompt_coming("p", 5)
    view.prompt_came("p", 5)
    view.prompt_sent("p", 5)
    view.admitted("d", 5, must_wait=True)
    view.prompt_answered("p", 5)
    view.ended("d")
    with pytest.raises(AssertionError):
        TWICE[call](view)


def test_a_replica_that_left_is_no_candidate_and_no_peer() -> None:
    pools = Pools()
    pools.view.sent("d", 5, must_wait=False)
    pools.decodes.clear()
    pools.prefills.clear()
    assert pools.view.decode_candidates() == pools.view.prefill_candidates() == []
    with pytest.raises(KeyError):
        pools.view.decode_peer("d")
    with pytest.raises(KeyError):
        pools.view.prefill_peer("p")
    pools.view.admitted("d", 5, must_wait=False)  # its last request may still end there
    pools.view.ended("d")


def test_a_dead_replica_is_forgotten_once_and_its_agent_named_if_anybody_used_it() -> None:
    pools = Pools()
    pools.view.decode_candidates()
    assert pools.view.decode_peer("d").address == b"\x00m"
    pools.view.heard(frame("d", load(free=1)))
    assert pools.view.forget("d") == "agent-d"
    assert pools.view.forget("d") is None
    assert pools.view.forget("p") is None
    assert pools.decode.free_blocks == 100


def test_the_registry_tells_of_replicas_that_have_published_something() -> None:
    registry = ReplicaRegistry()
    registry.update("decode", {"a": {"num_blocks": 1}})
    heard: list[tuple[str, ReplicaTable]] = []
    registry.listen(lambda deployment, table: heard.append((deployment, table)))
    registry.update("decode", {"a": {"num_blocks": 1}, "new": {}})
    registry.update("prefill", {})
    only_a = {"a": {"num_blocks": 1}}
    assert heard == [("decode", only_a), ("decode", only_a), ("prefill", {})]
    assert (registry.replicas("decode"), registry.replicas("unheard of")) == (only_a, {})


def test_prompts_that_decode_computes_itself_and_the_streams_beside_them() -> None:
    pools = Pools()
    pools.decodes = {"d": metadata("d") | {"step_tokens": 64}}
    pools.view.sent("d", 5, must_wait=False, local_tokens=70)
    cold = pools.decode
    assert (cold.num_rows, cold.queued_tokens, cold.tokens_per_s) == (1, 70, 0.0)
    assert (cold.step_tokens, cold.block_bytes) == (64, 1)
    pools.view.heard(frame("d", load(tokens=30, prefill_tokens_per_s=500.0)))
    known = pools.decode
    assert (known.num_rows, known.queued_tokens, known.tokens_per_s) == (1, 100, 500.0), "what it has not heard of, too"
    pools.view.sent("d", 5, must_wait=False)
    assert pools.decode.num_rows == 2, "more of ours than it has heard of"
    pools.view.admitted("d", 5, must_wait=False, local_tokens=70)
    assert pools.decode.queued_tokens == 30
    pools.view.heard(frame("d", replace(load(), num_running=9)))
    assert pools.decode.num_rows == 9, "others' too"
    pools.view.admitted("d", 5, must_wait=False)
    pools.view.ended("d")
    pools.view.ended("d")
    assert pools.decode.queued_tokens == 0


def test_each_load_tells_the_rate_of_a_pair() -> None:
    pools = Pools()
    pools.view.heard(frame("d", load(read_source="p", read_bytes_per_s=5e8)))
    pools.view.heard(frame("d", load(read_source="q", read_bytes_per_s=7e9)))
    pools.view.heard(frame("d", load()))
    assert [pools.view.pairs.of("d", name).bytes_per_s for name in "pqr"] == [5e8, 7e9, 0.0]
    pools.view.left({"d", "p"})
    assert [pools.view.pairs.of("d", name).bytes_per_s for name in "pqr"] == [5e8, 0.0, 0.0]
