"""Fields of POST /v1/responses that are refused by name, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from cluster.api_error import ApiError
from cluster.openai.unsupported import same

_SEND_ITEMS = "send the earlier items in input"


class Refused(NamedTuple):
    """neutral: the values that ask for nothing (beside null, and the field being absent). instead: the way out."""

    neutral: tuple[Any, ...]
    instead: str


# What would need something that is stored, or done later: no response outlives its request here.
_NEEDS_STORAGE: dict[str, Refused] = {
    "previous_response_id": Refused((), f"responses are not stored here: {_SEND_ITEMS}"),
    "conversation": Refused((), f"conversations are not stored here: {_SEND_ITEMS}"),
    "background": Refused((False,), "nothing is kept here to be fetched later: leave it out, and use stream"),
    "background_options": Refused(({},), "nothing is done in the background here: leave it out"),
    "prompt": Refused((), "prompt templates are not stored here: write the text into instructions and input"),
    "generate": Refused((True,), "nothing can be prepared without an answer here: leave it out"),
}
_NOT_DONE: dict[str, Refused] = {
    "truncation": Refused(
        ("disabled",),
        "no items are dropped here: shorten input yourself, or keep its last tokens by truncate_prompt_tokens",
    ),
    "context_management": Refused(([],), "nothing is compacted here: shorten input yourself"),
    "moderation": Refused((), "nothing is moderated here: leave it out"),
}
# Names that chat completions have, and other words for the same here.
_OF_CHAT: dict[str, Refused] = {
    "messages": Refused((), "in this endpoint they are called input"),
    "max_tokens": Refused((), "in this endpoint it is called max_output_tokens"),
    "max_completion_tokens": Refused((), "in this endpoint it is called max_output_tokens"),
    "response_format": Refused((), "in this endpoint it is called text.format"),
    "reasoning_effort": Refused((), "in this endpoint it is called reasoning.effort"),
    "functions": Refused(([],), "in this endpoint they are called tools"),
    "function_call": Refused(("none", "auto"), "in this endpoint it is called tool_choice"),
    "logprobs": Refused((False,), 'in this endpoint they are asked for by include ["message.output_text.logprobs"]'),
}
# Of what chat completions do, what has no place in a response.
_ONLY_CHAT: dict[str, Refused] = {
    name: Refused(neutral, "a response has one answer and no place for it: use /v1/chat/completions")
    for name, neutral in (
        ("n", (1,)),
        ("best_of", (1,)),
        ("use_beam_search", (False,)),
        ("length_penalty", (1,)),
        ("early_stopping", (False,)),
        ("prompt_logprobs", ()),
        ("return_token_ids", (False,)),
        ("return_tokens_as_token_ids", (False,)),
        ("add_generation_prompt", (True,)),
        ("continue_final_message", (False,)),
        ("echo", (False,)),
    )
}

REFUSED: dict[str, Refused] = {**_NEEDS_STORAGE, **_NOT_DONE, **_OF_CHAT, **_ONLY_CHAT}

# Types of tools that other servers run by themselves.
HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)


def refuse(body: Mapping[str, Any]) -> None:
    """Raises ApiError 400 `unsupported`, naming the field and the way out, for the first one that asks for something
    that is not done here.
    """
    for name, refused in REFUSED.items():
        value = body.get(name)
        if value is None or any(same(value, candidate) for candidate in refused.neutral):
            continue
        allowed = " or ".join(orjson.dumps(candidate).decode() for candidate in refused.neutral)
        hint = f" (it may be {allowed}, or left out)" if allowed else ""
        raise ApiError(400, f"{name} is not supported{hint}: {refused.instead}", param=name, code="unsupported")
