"""Messages to prompt text, by the model's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.api_error import ApiError
from cluster.text.control_tokens import ControlTokens
from cluster.text.stand_ins import StandIns, map_texts, private_use, two_sets

_PROBE = "splitserve_probe"  # the name of an argument, that no template has

_Hide = Callable[[str, StandIns], str]

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
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a client may say about rendering. variables: vLLM's chat_template_kwargs, by name. tools: those that the
    model is told of, as OpenAI writes them; only of use to a template that shows them (`ChatTemplate.shows_tools`).
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What a template is shown."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    tools: list[Any] = field(default_factory=list)


class ChatTemplate:
    """Renders messages so that their text can't forge the template's control tokens. Thread-safe.

    A template is a program, which may cut, change and join texts at will. So it is run on the messages as they are, for
    the prompt, and again with stand-ins for what could make a control token, to learn which characters of the prompt
    are its own. If the prompts differ, it looks for such characters in the text: then fewer have stand-ins, only whole
    control tokens; and at last the text with those stand-ins counts, if it does not matter which ones they are.

    What templates do not say by themselves is decided here:
    - role "developer" is OpenAI's newer word for "system", and becomes that unless the template knows it;
    - tool messages and tool calls are refused unless the template knows them: most would drop them silently;
    - arguments of tool calls are objects, unless the template writes only strings as JSON: found by trying.

    shows_tools: whether the model is told of a request's tools.
    """

    def __init__(self, tokenizer: Any, source: str | None, control_tokens: ControlTokens) -> None:
        """tokenizer: a transformers tokenizer, asked only to render. source: its chat template; None: it has none."""
        self._tokenizer = tokenizer
        self._source = source
        self._control_tokens = control_tokens
        self._seen = private_use([source or "", control_tokens.characters])
        self._usual = two_sets(control_tokens.characters, self._seen)
        self._knows_developer = _names(source, "developer")
        self._knows_tool_role = _names(source, "tool")
        self._knows_tool_calls = "tool_calls" in (source or "")
        self.shows_tools = re.search(r"\btools\b", source or "") is not None
        self._writes_arguments_as_text = self._knows_tool_calls and self._takes_only_text()

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
            tools = list(options.tools) if self.shows_tools else []
            return self._guarded(_Conversation(prepared, _accepted(options.variables), tools), options)
        except ApiError:
            raise
        except Exception as error:
            # A template is a program from the model's repository; whatever it raises is about these messages. So is
            # a RecursionError: arguments of tool calls may be nested.
            reason = str(error)[:300]
            message = f"the model's chat template does not take these messages: {reason}"
            raise ApiError(400, message, param="messages", code="invalid_messages") from error

    def _guarded(self, conversation: _Conversation, options: TemplateOptions) -> str:
        plain = self._run(conversation, options)
        stand_ins, others = self._stand_ins(conversation)
        tokens = self._control_tokens
        for hide_untrusted in (tokens.hide_pieces, tokens.hide_whole):
            hidden = self._hidden(conversation, stand_ins, hide_untrusted)
            shown = plain if hidden == conversation else self._try(hidden, options)
            if shown is not None and stand_ins.fit(shown, plain):
                return tokens.disclose(shown, plain)
        again = self._try(self._hidden(conversation, others, tokens.hide_whole), options)
        if shown is None or again is None or stand_ins.reveal(shown) != others.reveal(again):
            raise ValueError("it takes control tokens in the text of a message apart")
        return tokens.disclose(shown, stand_ins.reveal(shown))

    def _stand_ins(self, conversation: _Conversation) -> tuple[StandIns, StandIns]:
        seen = private_use([conversation.messages, conversation.variables, conversation.tools])
        return two_sets(self._control_tokens.characters, self._seen | seen) if seen else self._usual

    def _hidden(self, conversation: _Conversation, stand_ins: StandIns, hide_untrusted: _Hide) -> _Conversation:
        """A copy with stand-ins, whose untrusted texts are hidden in this way."""
        hide_special = self._control_tokens.hide_special

        def hide(value: Any, way: _Hide) -> Any:
            return map_texts(value, lambda text: way(text, stand_ins))

        messages = []
        for message in conversation.messages:
            way = hide_untrusted if message["role"] in _UNTRUSTED_ROLES else hide_special
            messages.append({key: item if key == "role" else hide(item, way) for key, item in message.items()})
        return _Conversation(
            messages, hide(conversation.variables, hide_untrusted), hide(conversation.tools, hide_untrusted)
        )

    def _try(self, conversation: _Conversation, options: TemplateOptions) -> str | None:
        """None where the template does not take stand-ins, though it takes what they stand for."""
        try:
            return self._run(conversation, options)
        except Exception:
            return None

    def _run(self, conversation: _Conversation, options: TemplateOptions) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            conversation.messages,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=conversation.tools or None,
            **conversation.variables,
        )
        return rendered

    def _prepare(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message["role"]
        if role == "tool" and not self._knows_tool_role:
            raise _unsupported("messages of role 'tool'", f"messages[{index}].role")
        if message.get("tool_calls") and not self._knows_tool_calls:
            raise _unsupported("tool calls", f"messages[{index}].tool_calls")
        prepared = {**message, "role": "system" if role == "developer" and not self._knows_developer else role}
        if self._writes_arguments_as_text and message.get("tool_calls"):
            prepared["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return prepared

    def _takes_only_text(self) -> bool:
        """Whether a past call's arguments must be given as text. Some templates put them in as they are: an object
        would be written in Python's way, or be no text to join.
        """
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {_PROBE: "x"}}}

        def rendered(call: dict[str, Any]) -> str | None:
            asking = {"role": "assistant", "content": "", "tool_calls": [call]}
            answer = {"role": "tool", "content": "1", "name": "f", "tool_call_id": call["id"]}
            messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, asking, answer]
            return self._try(_Conversation(messages, {}), TemplateOptions(add_generation_prompt=False))

        as_object, as_text = rendered(call), rendered(_with_text_arguments(call))
        has_object = as_object is not None and f"'{_PROBE}'" not in as_object
        return not has_object and as_text is not None and f'"{_PROBE}"' in as_text


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _accepted(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The client's own variables. Raises ApiError 400 for a name that means something to transformers."""
    if reserved := sorted(_RESERVED_VARIABLES & variables.keys()):
        raise _unsupported(f"the variable {reserved[0]!r}", "chat_template_kwargs")
    return dict(variables)


def _names(source: str | None, word: str) -> bool:
    """Whether a template compares something to this word."""
    return re.search(rf"""['"]{word}['"]""", source or "") is not None


def _unsupported(what: str, param: str) -> ApiError:
    return ApiError(400, f"this model's chat template does not support {what}", param=param, code="unsupported")
