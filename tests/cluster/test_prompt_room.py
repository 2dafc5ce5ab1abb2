"""Which prompts go to another prefill replica: those behind many, to one with few, nobody to and fro."""

from __future__ import annotations

import random

import pytest

from cluster.policies.routing_policy import Route, RouteKind, Unavailable
from cluster.routing.prompt_room import PromptRoom, WaitingPrompt

Prompt = tuple[str, str, int]  # who, where, tokens


def room_of(*prompts: Prompt, sent_s: float = 0.0, num_moves: int = 0) -> PromptRoom[str]:
    room: PromptRoom[str] = PromptRoom(settle_s=1.0)
    for who, where, num_tokens in prompts:
        prompt: WaitingPrompt[str] = WaitingPrompt(where, num_tokens, sent_s, num_moves)
        prompt.who = who
        room.enter(prompt)
    return room


def moves(room: PromptRoom[str], queued: dict[str, int], tokens: dict[str, int], must_wait: bool = False) -> list[str]:
    """Each to the shortest queue, as it is then."""

    def decide(_: str) -> Route:
        best = min(queued, key=lambda name: (queued[name], name))
        return Route(RouteKind.REMOTE, "decode", best, must_wait, 1)

    found = []
    for who, route in room.movable(10.0, dict(queued), decide):
        assert route.prefill_id is not None
        queued[route.prefill_id] += tokens[who]
        found.append(f"{who}>{route.prefill_id}")
    return found


def ten(where: str = "old") -> list[Prompt]:
    return [(f"p{index}", where, 100) for index in range(10)]


TOKENS = {f"p{index}": 100 for index in range(10)}


@pytest.mark.parametrize(
    ("prompts", "queued", "expected"),
    [
        ([], {"old": 0, "new": 0}, []),
        (ten(), {"old": 1000}, []),
        # The first two stay: one is being computed, and behind it the next waits no longer than a move takes. Then one
        # goes for every two that stay.
        (ten(), {"old": 1000, "new": 0}, ["p2>new", "p5>new", "p8>new"]),
        (ten(), {"old": 1000, "new": 100}, ["p4>new", "p7>new"]),
        (ten(), {"old": 1000, "new": 900}, []),
        (ten()[:2], {"old": 200, "new": 0}, []),
    ],
)
def test_who_moves(prompts: list[Prompt], queued: dict[str, int], expected: list[str]) -> None:
    assert moves(room_of(*prompts), dict(queued), TOKENS) == expected


def test_nobody_moves_who_was_just_sent_or_moved_or_whom_decode_would_not_admit() -> None:
    queued = {"old": 1000, "new": 0}
    assert moves(room_of(*ten(), sent_s=9.5), dict(queued), TOKENS) == []
    assert moves(room_of(*ten(), sent_s=8.5, num_moves=1), dict(queued), TOKENS) == []
    assert moves(room_of(*ten()), dict(queued), TOKENS, must_wait=True) == []
    assert list(room_of(*ten()).movable(10.0, queued, lambda _: Unavailable("decode"))) == []
    local = Route(RouteKind.BUSY_PREFILL, "decode", None, False, 1)
    assert list(room_of(*ten()).movable(10.0, queued, lambda _: local)) == []


def test_nobody_is_asked_where_no_queue_is_short() -> None:
    def never(who: str) -> Route:
        raise AssertionError(f"{who} was asked")

    assert list(room_of(*ten()).movable(10.0, {"old": 1000, "new": 450}, never)) == []


def test_when_it_is_looked_through() -> None:
    room = room_of(*ten()[:1])
    assert room.is_due(10.0)
    assert moves(room, {"old": 100, "new": 0}, TOKENS) == []
    assert not room.is_due(10.05)
    assert room.is_due(10.2)
    assert not room_of().is_due(10.0)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_later_for_a_move(seed: int) -> None:
    """Random queues: whoever moves has less before it there, those that moved with it included."""
    rng = random.Random(seed)
    prompts = [(f"p{i}", rng.choice(["a", "b"]), rng.randint(1, 500)) for i in range(rng.randint(0, 40))]
    tokens = {who: num_tokens for who, _, num_tokens in prompts}
    queued = {name: sum(t for _, where, t in prompts if where == name) for name in ("a", "b", "c")}
    queued["c"] = rng.choice([0, 0, 300])
    now = dict(queued)
    for move in moves(room_of(*prompts), now, tokens):
        who, there = move.split(">")
        (index,) = (i for i, prompt in enumerate(prompts) if prompt[0] == who)
        before = sum(t for _, where, t in prompts[:index] if where == prompts[index][1])
        assert there != prompts[index][1]
        assert now[there] - tokens[who] <= now[there]
        assert queued[there] < before
