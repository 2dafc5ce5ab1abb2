"""The digest that an ingress compares with its replicas' is of the very tokenizer that it goes by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.serving import ingress
from cluster.serving.ingress import _load_tokenizer
from cluster.text.tokenizer import Tokenizer
from replicas.model.identity_digests import tokenizer_digest
from tests.model_folder import model_folder


@pytest.fixture(name="folder")
def copied_folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(Path(model_folder()) / name, tmp_path / name)
    return tmp_path


def test_it_is_that_of_the_folder(folder: Path) -> None:
    tokenizer, digest = _load_tokenizer(str(folder), True)
    assert digest == tokenizer_digest(str(folder))
    assert tokenizer.vocab_size


@pytest.mark.parametrize("when", ["before", "after"])
def test_files_that_are_replaced_while_they_are_read_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Else it would write ids of one vocabulary, and take the replicas of the other for its like."""

    def replace() -> None:
        path = folder / "tokenizer.json"
        spec = json.loads(path.read_bytes())
        ids = spec["model"]["vocab"]
        one, other = list(ids)[1000:1002]
        ids[one], ids[other] = ids[other], ids[one]
        path.write_text(json.dumps(spec))

    def load(*arguments: Any) -> Tokenizer:
        if when == "before":
            replace()
        tokenizer = Tokenizer(*arguments)
        if when == "after":
            replace()
        return tokenizer

    monkeypatch.setattr(ingress, "Tokenizer", load)
    with pytest.raises(ValueError, match="changed while they were read"):
        _load_tokenizer(str(folder), True)
