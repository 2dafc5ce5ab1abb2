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
    # tools under the names that OpenAI has left behind
    "functions": ([],),
    "function_call": ("none", "auto"),
    # tools that are no functions of the client's
    "web_search_options": (),
    # how the prompt is made
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    # other servers' own plumbing
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


# What to use in place of some of them.
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}


def refuse_unsupported(body: Mapping[str, Any], others: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError 400 `unsupported`, naming the field, for the first one with a value that is not neutral.

    others: further fields with their neutral values, those that only another endpoint has.
    """
    for name, neutral in (*NEUTRAL_VALUES.items(), *others.items()):
        value = body.get(name)
        if value is None or any(same(value, candidate) for candidate in neutral):
            continue
        allowed = " or ".join(orjson.dumps(candidate).decode() for candidate in neutral)
        hint = f": it may only be {allowed}, or left out" if neutral else ""
        instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise ApiError(400, f"{name} is not supported{hint}{instead}", param=name, code="unsupported")


def same(value: Any, neutral: Any) -> bool:
    """Equal in JSON: 0.0 is 0, but false is not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
