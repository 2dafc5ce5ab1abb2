"""The tokenizer of the model that comes with the tests' dependencies, read out of its GGUF once per session; and time
that passes at once for tests on one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import skipped_waits as waits
from tests.simulated_cluster.virtual_time import VirtualClock

if TYPE_CHECKING:
    from cluster.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as files, as they are in the folder that the model is converted into."""
    from cluster.config.model import find_bundled_gguf
    from replicas.gguf.file import read_gguf
    from replicas.gguf.tokenizer import write_tokenizer

    gguf = find_bundled_gguf()
    assert gguf is not None
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(read_gguf(Path(gguf)), folder)
    return folder


@pytest.fixture(scope="session")
def reference(tokenizer_folder: Path) -> Any:
    """transformers' own tokenizer, to compare with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def spec(reference: Any) -> dict[str, Any]:
    """The content of its tokenizer.json."""
    content: dict[str, Any] = json.loads(reference.backend_tokenizer.to_str())
    return content


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    from cluster.text.tokenizer import Tokenizer

    return Tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="module")
def _skipped_clock() -> Iterator[VirtualClock]:
    with waits.skipped_clock() as clock:
        yield clock


@pytest.fixture
async def skipped_waits(_skipped_clock: VirtualClock) -> None:
    """No wait on the test's event loop takes time, and none depends on how fast the machine is."""
    waits.skip_waits(asyncio.get_running_loop(), _skipped_clock)
