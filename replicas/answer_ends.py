"""The token ids at which a checkpoint says that an answer ends."""

from __future__ import annotations

from typing import Any

from replicas.checkpoint_file import checkpoint_file

GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"

_KEY = "eos_token_id"
# Where a config of several models has the one that writes text, in the order of transformers.
_TEXT_PARTS = ("decoder", "generator", "text_config")


def answer_ends(folder_or_hub_id: str) -> tuple[int, ...]:
    """What transformers' `generate` stops at after `from_pretrained` (5.24, `adjust_generation_fn`).

    generation_config.json alone counts where there is one, even one that names no end. config.json counts where there
    is none: its own ids, or those of its part for text. A default of the config's class counts nowhere. Ids that the
    model does not have are among them: they never come.

    May ask the Hub. Raises ValueError, naming the file, for what are no token ids.
    """
    generation = checkpoint_file(folder_or_hub_id, GENERATION_FILE)
    if generation is not None:
        return _ids(generation.get(_KEY), GENERATION_FILE)
    config = checkpoint_file(folder_or_hub_id, MODEL_FILE) or {}
    own = config.get(_KEY)
    return _ids(_text_part(config).get(_KEY) if own is None else own, MODEL_FILE)


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    parts = (config.get(name) for name in _TEXT_PARTS)
    return next((part for part in parts if part and isinstance(part, dict)), {})


def _ids(value: Any, file: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
        raise ValueError(f"{file} of the model: {_KEY} must be a token id, a list of token ids, or null")
    return tuple(ids)
