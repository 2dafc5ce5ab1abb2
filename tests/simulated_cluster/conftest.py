"""What the tests of the simulated cluster share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated_cluster.seed_run import Simulation, simulation


@pytest.fixture(scope="module")
def one() -> Iterator[Simulation]:
    """While a file's tests run, our modules' clocks are the simulation's."""
    with simulation() as running:
        yield running
