"""The body of an HTTP request, read and checked."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.limits import LimitsConfig
from cluster.http import body
from cluster.openai.request import CompletionBody


def test_two_long_bodies_at_a_time_leave_garbage_collection_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins while the other reads, and goes on when that one has ended: just before it turns it off itself."""
    first_reads, first_may_end = threading.Event(), threading.Event()

    def read() -> Any:
        return body._parse_long_body(b"", None, CompletionBody, LimitsConfig())

    first = threading.Thread(target=read)

    def parse(*_: object) -> None:
        if threading.current_thread() is first:
            first_reads.set()
            assert first_may_end.wait(60.0)

    def disable() -> None:
        if threading.current_thread() is not first:
            first_may_end.set()
            first.join(60.0)
            assert gc.isenabled(), "the first one has turned it on again"
        gc.disable()

    monkeypatch.setattr(body, "parse_body", parse)
    monkeypatch.setattr(body, "gc", SimpleNamespace(isenabled=gc.isenabled, disable=disable, enable=gc.enable))
    assert gc.isenabled()
    try:
        first.start()
        assert first_reads.wait(60.0)
        read()
        assert gc.isenabled(), "it is off for good: nobody turns it on any more"
    finally:
        first_may_end.set()
        gc.enable()
