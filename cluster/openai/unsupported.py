"""Fields of OpenAI's API, and of vLLM's, that ask for something this server does not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from cluster.api_error import ApiError

# Field -> the values that ask for nothing (beside null, and the field being absent). Everything else is refused: it
# would change the answer, and an answer that ignores it would be wrong without anyone noticing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # what comes back
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    # how tokens are chosen
    "logits_processors": ([],),
    # what the text must look like
    "guided_whitespace_pattern": (),
    # tools: a list of them is an offer, which the model may leave alone; these ask for a call
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # how the prompt is made
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    # other servers' own plumbing
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


# Lists of what the model may call, if it likes: never called here, as nothing may ask for it.
OFFERS = ("tools", "functions")
MAX_OFFERS = 128


def refuse_unsupported(body: Mapping[str, Any], others: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError 400 `unsupported`, naming the field, for the first one with a value that is not neutral,
    and 400 `invalid_value` for OFFERS that are no lists of objects.

    others: further fields with their neutral values, those that only another endpoint has.
    """
    for name, neutral in (*NEUTRAL_VALUES.items(), *others.items()):
        value = body.get(name)
        if value is None or any(_same(value, candidate) for candidate in neutral):
            continue
        allowed = " or ".join(orjson.dumps(candidate).decode() for candidate in neutral)
        hint = f": it may only be {allowed}, or left out" if neutral else ""
        raise ApiError(400, f"{name} is not supported{hint}", param=name, code="unsupported")
    for name in OFFERS:
        _check_offer(name, body.get(name))


def _check_offer(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value[:MAX_OFFERS]):
        raise ApiError(400, f"{name} must be an array of objects", param=name, code="invalid_value")
    if len(value) > MAX_OFFERS:
        message = f"{name} has {len(value)} entries; at most {MAX_OFFERS} are allowed"
        raise ApiError(400, message, param=name, code="invalid_value")


def _same(value: Any, neutral: Any) -> bool:
    """Equal in JSON: 0.0 is 0, but false is not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
