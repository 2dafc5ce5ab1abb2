"""The parts of an answer that is taken apart, as OpenAI's objects have them: content, reasoning, calls of tools."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Sequence
from typing import Any

from cluster.answers.answer_part import AnswerPart, PartKind

_LETTERS = string.ascii_letters + string.digits


def new_call_id(is_short: bool) -> str:
    """is_short: nine letters and digits, which is what Mistral's templates take back."""
    if is_short:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"


def reasoning_fields(text: str) -> dict[str, str]:
    """Under both names that clients read: reasoning_content is DeepSeek's and SGLang's, reasoning vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def part_delta(part: AnswerPart, has_short_ids: bool) -> dict[str, Any]:
    """What a part adds to a streamed message."""
    match part.kind:
        case PartKind.CONTENT:
            return {"content": part.text}
        case PartKind.REASONING:
            return reasoning_fields(part.text)
        case PartKind.CALL:
            function = {"name": part.text, "arguments": ""}
            head = {"index": part.call, "id": new_call_id(has_short_ids), "type": "function"}
            return {"tool_calls": [head | {"function": function}]}
        case PartKind.ARGUMENTS:
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


def whole_message(parts: Sequence[AnswerPart], has_short_ids: bool) -> dict[str, Any]:
    """A message of the assistant. content: null where there is none."""
    texts = {kind: "".join(part.text for part in parts if part.kind is kind) for kind in PartKind}
    message: dict[str, Any] = {"role": "assistant", "content": texts[PartKind.CONTENT] or None, "refusal": None}
    if texts[PartKind.REASONING]:
        message |= reasoning_fields(texts[PartKind.REASONING])
    calls = [
        {
            "id": new_call_id(has_short_ids),
            "type": "function",
            "function": {"name": part.text, "arguments": _arguments_of(parts, part.call)},
        }
        for part in parts
        if part.kind is PartKind.CALL
    ]
    return message | {"tool_calls": calls} if calls else message


def _arguments_of(parts: Sequence[AnswerPart], call: int) -> str:
    return "".join(part.text for part in parts if part.kind is PartKind.ARGUMENTS and part.call == call)
