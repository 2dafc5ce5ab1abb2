"""JSON files that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def checkpoint_file(folder_or_hub_id: str, name: str) -> dict[str, Any] | None:
    """The content of a model's file; None if it has no such file. May ask the Hub.

    Raises ValueError, naming the file, for one that is no JSON object. NaN and Infinity are let pass, as transformers
    writes them.
    """
    path = _find(folder_or_hub_id, name)
    if path is None:
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:  # no JSON, or no text at all
        raise ValueError(f"{name} of the model is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} of the model is no JSON object")
    return content


def _find(folder_or_hub_id: str, name: str) -> Path | None:
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file  # takes seconds

    path = cached_file(folder_or_hub_id, name, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None
