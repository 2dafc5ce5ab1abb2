"""Actions run on the engine's thread, in order, for as long as it has time for them."""

from __future__ import annotations

import threading
import time

from replicas.engine.inbox import Inbox


def test_actions_run_in_their_order_and_those_they_post_too() -> None:
    inbox, done = Inbox(), []

    def first() -> None:
        done.append("first")
        inbox.post(lambda: done.append("of first"))

    inbox.post(first)
    inbox.post(lambda: done.append("second"))
    inbox.run_all()
    assert done == ["first", "second", "of first"]


def test_what_comes_before_the_deadline_runs_and_nothing_is_waited_for_after_it() -> None:
    inbox, done = Inbox(), []
    late = threading.Timer(0.02, inbox.post, [lambda: done.append(time.monotonic())])
    late.start()
    deadline_s = time.monotonic() + 0.2
    inbox.run_until(deadline_s)
    ended_s = time.monotonic()
    late.join()
    assert len(done) == 1
    assert done[0] < deadline_s <= ended_s
    inbox.run_until(time.monotonic() - 1.0)
    assert time.monotonic() - ended_s < 0.1


def test_one_action_ends_a_wait() -> None:
    inbox, done = Inbox(), []
    inbox.run_next(0.01)
    for number in range(2):
        inbox.post(lambda number=number: done.append(number))  # type: ignore[misc]
    inbox.run_next(5.0)
    assert done == [0]
