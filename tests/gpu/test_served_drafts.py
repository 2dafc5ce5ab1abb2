"""Servers whose rows are drafted by n-grams: what they say is what transformers says, in every layout.

On an H200 with a cold compile cache: 60 to 90 s until one is ready, 70 s for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import served_texts
from tests.gpu.served_place import PLACES, Place, serving
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    served_texts.allow_no_rounding()
    place: Place = request.param
    return place


@pytest.fixture(scope="module", params=["colocated", "two_lanes", "split"])
def server(
    request: pytest.FixtureRequest, place: Place, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with serving(request.param, place, tmp_path_factory.mktemp("drafts"), drafting="ngram") as server:
        yield server


def test_goldens(server: RunningServer, place: Place) -> None:
    served_texts.check_goldens(server, place)


def test_sampled_requests_and_rules(server: RunningServer, place: Place) -> None:
    served_texts.check_choices(server, place)


def test_goldens_under_load_with_too_little_memory(server: RunningServer, place: Place) -> None:
    served_texts.check_preempted(server, place)
