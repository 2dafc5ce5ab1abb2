"""Messages to prompt text, by the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.api_error import ApiError
from cluster.text.control_tokens import ControlTokens

# Their text comes from users and from the outside world; the others' from the application and from the model.
_UNTRUSTED_ROLES = ("user", "tool")

# What transformers gives a template itself, or takes as an option of its own.
_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a client may say about rendering. variables: vLLM's chat_template_kwargs, by name."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """Renders messages so that their text can't forge the template's control tokens. Thread-safe.

    What templates do not say by themselves is decided here:
    - role "developer" is OpenAI's newer word for "system", and becomes that unless the template knows it;
    - tool messages and tool calls are refused unless the template knows them: most would drop them silently.
    """

    def __init__(self, tokenizer: Any, source: str | None, control_tokens: ControlTokens) -> None:
        """tokenizer: a transformers tokenizer, asked only to render. source: its chat template; None: it has none."""
        self._tokenizer = tokenizer
        self._source = source
        self._control_tokens = control_tokens
        self._knows_developer = _names(source, "developer")
        self._knows_tool_role = _names(source, "tool")
        self._knows_tool_calls = "tool_calls" in (source or "")

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions | None = None) -> str:
        """The prompt as text for the guarded tokenizer, by default up to where the assistant's answer begins.

        messages: dicts with "role" and a string "content"; perhaps "name", "tool_call_id", "tool_calls" (with
        arguments as objects). Raises ApiError 400 for what this model's template does not take.
        """
        options = options or TemplateOptions()
        if self._source is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        try:
            prepared = [self._prepare(index, message) for index, message in enumerate(messages)]
            rendered: str = self._tokenizer.apply_chat_template(
                prepared,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **self._variables(options.variables),
            )
            return self._control_tokens.disclose(rendered)
        except ApiError:
            raise
        except Exception as error:
            # A template is a program from the model's repository; whatever it raises is about these messages. So is
            # a RecursionError: arguments of tool calls may be nested.
            reason = str(error)[:300]
            message = f"the model's chat template does not take these messages: {reason}"
            raise ApiError(400, message, param="messages", code="invalid_messages") from error

    def _variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The client's own variables, their text as harmless as that of messages."""
        if reserved := sorted(_RESERVED_VARIABLES & variables.keys()):
            raise _unsupported(f"the variable {reserved[0]!r}", "chat_template_kwargs")
        hidden: dict[str, Any] = self._control_tokens.hide(variables, special_only=False)
        return hidden

    def _prepare(self, index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = message["role"]
        if role == "tool" and not self._knows_tool_role:
            raise _unsupported("messages of role 'tool'", f"messages[{index}].role")
        if message.get("tool_calls") and not self._knows_tool_calls:
            raise _unsupported("tool calls", f"messages[{index}].tool_calls")
        hidden: dict[str, Any] = self._control_tokens.hide(message, special_only=role not in _UNTRUSTED_ROLES)
        if role == "developer" and not self._knows_developer:
            hidden["role"] = "system"
        return hidden


def _names(source: str | None, word: str) -> bool:
    """Whether a template compares something to this word."""
    return re.search(rf"""['"]{word}['"]""", source or "") is not None


def _unsupported(what: str, param: str) -> ApiError:
    return ApiError(400, f"this model's chat template does not support {what}", param=param, code="unsupported")
