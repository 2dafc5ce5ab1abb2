"""How far rotary positions reach that depend on the whole step: beyond, a text would depend on its neighbours.

By a model's configuration alone, so no torch.
"""

from __future__ import annotations

from typing import Any

from replicas.model_support import UnsupportedModel, model_name


def depends_on_step(kind: str) -> bool:
    """Whether rotary positions of this kind are taken from the longest position of a whole pass."""
    return kind == "longrope" or "dynamic" in kind


def original_length(config: Any) -> int | None:
    """Positions that the model was trained on before they were stretched; None when the configuration tells none."""
    lengths = [parameters.get("original_max_position_embeddings") for parameters in _rope_parameters(config)]
    lengths.append(getattr(config, "original_max_position_embeddings", None))
    return min((int(length) for length in lengths if length), default=None)


def step_dependent_reach(config: Any) -> tuple[str, int] | None:
    """The kind, and the longest request that it does not concern; None for a model of no such kind."""
    reaches = []
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        if depends_on_step(kind):
            # Only longrope looks at the original length; dynamic scaling begins where the stated positions end.
            safe = original_length(config) if kind == "longrope" else None
            reaches.append((safe or config.max_position_embeddings, kind))
    if not reaches:
        return None
    reach, kind = min(reaches)
    return kind, reach


def refuse_step_dependent(config: Any, max_model_len: int) -> None:
    """Raise UnsupportedModel where a kind that depends on the step would do so within max_model_len."""
    found = step_dependent_reach(config)
    if found is not None and max_model_len > found[1]:
        kind, safe = found
        raise UnsupportedModel(
            f"{model_name(config)} takes its rotary frequencies ({kind}) from the longest position of a whole "
            f"step, so beyond {safe} positions a text would depend on its neighbours; set model.max_model_len to "
            f"{safe} or less"
        )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of the model, or of each kind of its layers."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or [given]
