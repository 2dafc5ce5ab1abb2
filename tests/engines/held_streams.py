"""Streams that do not end before a test has done what is to befall them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from replicas.serving.engine_builder import BuiltEngine
from scheduler.plan import StepPlan

_FLUSH_S = 0.01


@contextmanager
def held_streams(engines: Iterable[BuiltEngine], num_tokens: int) -> Iterator[threading.Event]:
    """Until the event, or the end of this, none of these engines takes a step with a text of so many tokens: it stands
    still, but for what it has said, which leaves. For engines of one lane."""
    goes_on = threading.Event()
    with ExitStack() as stack:
        for built in engines:
            stack.enter_context(_held(built, num_tokens, goes_on))
        try:
            yield goes_on
        finally:
            goes_on.set()


@contextmanager
def _held(built: BuiltEngine, num_tokens: int, goes_on: threading.Event) -> Iterator[None]:
    engine, launch = built.engine, built.engine._launch

    def is_long(plan: StepPlan) -> bool:
        requests = [engine.scheduler.get(part.request_id) for part in plan.slices]
        texts = [text for request in requests if request is not None for text in request.sequences]
        return any(text.num_known >= num_tokens for text in texts)

    def launched(plan: StepPlan) -> Any:
        while not goes_on.is_set() and is_long(plan):
            engine.sender.flush()  # a router may have let it in by now
            goes_on.wait(_FLUSH_S)
        return launch(plan)

    engine._launch = launched  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._launch = launch  # type: ignore[method-assign]
