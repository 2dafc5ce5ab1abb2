"""A model folder without weights: a shape's config.json and a tokenizer that has text for every id."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def make_shape_folder(shape: Path, folder: Path, tokenizer: Path | None = None) -> Path:
    """shape: a config.json under any name. tokenizer: a folder with a byte-level tokenizer.json.

    Random weights choose tokens from all over the vocabulary. Ids that the tokenizer lacks get a word each, so that
    every token is text to a client, whichever server it comes from. Writes the folder; returns it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape, folder / "config.json")
    if tokenizer is None:
        return folder
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)
    spec = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = spec["model"]["vocab"]
    vocab_size = json.loads(shape.read_text())["vocab_size"]
    first = max([*vocabulary.values(), *(token["id"] for token in spec["added_tokens"])]) + 1
    vocabulary |= {f"\u0120w{token_id}": token_id for token_id in range(first, vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    return folder
