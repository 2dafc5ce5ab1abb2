"""Two lanes: tests that start servers in one worker, every other file whole in the other.

A server test waits more than it computes, and two Ray servers that start at once can keep each other from being up
in time. `make test` starts two workers of pytest-xdist; without it (`pytest FILE`) only the order is decided here.

No example of hypothesis has a deadline: a machine that stands still for a second is no failure.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_SERVER_TESTS = "tests/server/"


def pytest_configure() -> None:
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Server tests hold deadlines of seconds; they go first wherever both lanes want a core.
    if "PYTEST_XDIST_WORKER" in os.environ and not _starts_a_server(item) and os.nice(0) == 0:
        os.nice(10)


def pytest_collection_finish() -> None:
    # What is imported and collected stays. Looking through it again and again was a tenth of what small tests take.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers come first: they are the longer lane."""
    items.sort(key=lambda item: not _starts_a_server(item))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Imported here: without the plugin nobody calls this. Its own --dist loadgroup does nothing under pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _SERVER_TESTS if _is_of_a_server(nodeid) else nodeid.partition("::")[0]

    return Lanes(config, log)


def _starts_a_server(item: pytest.Item) -> bool:
    return _is_of_a_server(item.nodeid)


def _is_of_a_server(nodeid: str) -> bool:
    """Those of tests/gpu only on a CPU: a card's host has cores for all of them at once."""
    return nodeid.startswith(_SERVER_TESTS) or (nodeid.startswith("tests/gpu/") and nodeid.endswith("[cpu]"))
