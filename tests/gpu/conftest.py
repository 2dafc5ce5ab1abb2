"""The kernels run on a card, or, slowly, in Triton's interpreter (TRITON_INTERPRET=1); whole servers also on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" not in str(item.path).replace(os.sep, "/"):
            continue
        if torch.cuda.is_available() or _is_on_a_cpu(item):
            continue
        if not (_INTERPRETED and item.get_closest_marker("interpreted")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card (or TRITON_INTERPRET=1, for kernel tests)"))


def _is_on_a_cpu(item: pytest.Item) -> bool:
    """Whether it is for a place (served_place) without a card."""
    place = getattr(item, "callspec", None) and item.callspec.params.get("place")  # type: ignore[attr-defined]
    return getattr(place, "device", "") == "cpu"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
