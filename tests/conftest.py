"""Two lanes (pytest-xdist, `make test`): whole servers one after another in one, everything else beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

_SERVERS = Path(__file__).parent / "server"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first, as theirs is the longer lane; the rest file by file, so that what a module shares is made once."""
    items.sort(key=lambda item: not item.path.is_relative_to(_SERVERS))
    for item in items:
        group = "servers" if item.path.is_relative_to(_SERVERS) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
