"""The bundled model without most of its layers: with the whole tokenizer and vocabulary, and steps of milliseconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.engine.bench_settings import bundled_model_folder

_LAYERS = "model.layers."


def save_short_model(folder: Path, num_layers: int) -> None:
    """Writes a checkpoint of its first layers. Blocks for a second. Raises NoModel."""
    whole = Path(bundled_model_folder())
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "complete"))
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    tensors = load_file(whole / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < num_layers}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def _layer(name: str) -> int:
    """-1 of what belongs to none."""
    return int(name.removeprefix(_LAYERS).partition(".")[0]) if name.startswith(_LAYERS) else -1
