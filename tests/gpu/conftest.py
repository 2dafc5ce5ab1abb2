"""The kernels run on a card, or, slowly, in Triton's interpreter (TRITON_INTERPRET=1). Elsewhere nothing here can."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not _HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]  # replaced by one skipped test, below, that says why


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" not in str(item.path).replace(os.sep, "/"):
            continue
        if not torch.cuda.is_available() and not (_INTERPRETED and item.get_closest_marker("interpreted")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card (or TRITON_INTERPRET=1, for kernel tests)"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
