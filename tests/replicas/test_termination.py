"""SIGTERM's way into a replica: the first begins a drain, the second ends it, and so does the time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from replicas.serving.termination import ReplicaTerminating, Termination


def test_the_first_begins_a_drain_and_the_second_ends_the_process() -> None:
    exits: list[tuple[object, ...]] = []
    worker = SimpleNamespace(raise_sys_exit_with_custom_error_message=lambda *a, **kw: exits.append((a, kw)))
    drains: list[bool] = []
    termination = Termination(60.0, end_process=exits.append, on_request=lambda: drains.append(True))
    termination.install(worker)
    termination.check()
    worker.raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.", exit_code=1)
    assert termination.is_requested
    assert (exits, drains) == ([], [True])
    with pytest.raises(ReplicaTerminating, match="SIGTERM"):
        termination.check()
    worker.raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.", exit_code=1)
    assert exits == [(("The process receives a SIGTERM.",), {"exit_code": 1})]


def test_if_serve_never_ends_it_it_ends_itself() -> None:
    ends: list[int] = []
    Termination(0.05, end_process=ends.append).request()
    deadline_s = time.monotonic() + 120.0
    while not ends:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert ends == [1]


def test_ray_as_it_is_pinned_has_the_name_that_is_replaced() -> None:
    from ray._private import worker

    source = worker.Worker.main_loop.__code__
    names = {name for const in (*source.co_consts, source) if hasattr(const, "co_names") for name in const.co_names}
    assert "raise_sys_exit_with_custom_error_message" in names
    assert callable(worker.raise_sys_exit_with_custom_error_message)


def test_without_that_name_it_is_said_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    Termination(1.0).install(SimpleNamespace())
    assert "without a drain" in caplog.text
