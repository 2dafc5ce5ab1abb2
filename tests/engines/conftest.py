from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.grammar_reference import GrammarReference
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import save_tiny_model
from tests.engines.tiny_tokenizer import END_ID, VOCAB_SIZE, save_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_goldens(tmp_path_factory: pytest.TempPathFactory) -> TinyGoldens:
    return TinyGoldens(tmp_path_factory.mktemp("tiny goldens"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its tokenizer, which grammars need."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Path) -> GrammarReference:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    return GrammarReference(model, tiny_folder, VOCAB_SIZE, {END_ID})
