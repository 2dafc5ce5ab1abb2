from __future__ import annotations

import pytest

from tests.engines.tiny_goldens import TinyGoldens


@pytest.fixture(scope="session")
def tiny_goldens(tmp_path_factory: pytest.TempPathFactory) -> TinyGoldens:
    return TinyGoldens(tmp_path_factory.mktemp("tiny goldens"))
