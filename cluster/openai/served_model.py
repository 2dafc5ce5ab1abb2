"""The model that is served: whether a request means it, and its card."""

from __future__ import annotations

from typing import Any

from cluster.api_error import ApiError


def check_model(asked: str | None, served: str) -> None:
    """Raises ApiError 404 if a request names another model; naming none is fine."""
    if asked is not None and asked != served:
        raise ApiError(
            404,
            f"the model {asked[:100]!r} does not exist; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


def model_card(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """The body of GET /v1/models/{model}: with its context length as vLLM gives it. created: Unix time in seconds."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "splitserve",
        "max_model_len": max_model_len,
    }


def model_list(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [model_card(model, created, max_model_len)]}
