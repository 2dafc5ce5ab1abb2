"""How families of models write: minimal chat templates in their manner, and answers as those models give them.

Written for these tests after the formats that the families document (model cards and chat templates of Qwen2.5, Qwen3,
Qwen3-Coder, Hermes 2 Pro, Llama 3.1, Mistral 7B v0.3, Mistral Small 3.2, DeepSeek-R1 and DeepSeek-V3.1); none of their
texts is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

_CALLS = "{% if m.tool_calls %}{% for c in m.tool_calls %}"
_ROLES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "{CALL}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{END}{% endif %}"
)
_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{INSTRUCTION}{% endif %}"
_HERMES_CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
_THINKS = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def _template(instruction: str, call: str, end: str = "") -> str:
    """A chat template in ChatML's manner. It knows role 'tool'."""
    text = _TOOLS.replace("{INSTRUCTION}", instruction) + _ROLES.replace("{CALL}", call).replace("{END}", end)
    return "{# 'tool' #}" + text


_DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
TEMPLATES = {
    "hermes": _template("<tool_call> </tool_call>", _HERMES_CALL),
    "qwen3": _template("<tool_call> </tool_call>", _HERMES_CALL, _THINKS),
    "qwen3_coder": _template(
        "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "llama3_json": _template(
        '<|start_header_id|> Respond in the format {"name": function name, "parameters": {}}',
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    ),
    "mistral": _template("[AVAILABLE_TOOLS]", "[TOOL_CALLS][{{ c.function | tojson }}]"),
    "mistral_named": _template("", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"),
    "deepseek_r1": _template("", _DEEPSEEK_CALL, "<think>\n"),
    "deepseek_v31": _template(
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments }}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "{% if thinking %}<think>{% else %}</think>{% endif %}",
    ),
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
}

Part = tuple[str, str] | tuple[str, str, int]


@dataclass(frozen=True)
class Transcript:
    """family: of a template. text: what the model writes. parts: what it is; calls by their order."""

    family: str
    text: str
    parts: tuple[Part, ...]
    num_valid: int = 0
    num_malformed: int = 0
    is_open: bool = False
    opens_in_prompt: bool = False


def _call(name: str, arguments: str, index: int = 0) -> tuple[Part, ...]:
    return (("CALL", name, index), ("ARGUMENTS", arguments, index))


_PARIS, _BERN = '{"city": "Paris"}', '{"city": "Bern, \\"CH\\" {<tool_call>}"}'
TRANSCRIPTS = (
    Transcript("hermes", " Nothing to call.\n", (("CONTENT", " Nothing to call.\n"),)),
    Transcript(
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {_PARIS}}}\n</tool_call>',
        _call("weather", _PARIS),
        1,
    ),
    Transcript(
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "weather", "arguments": {_PARIS}}}\n</tool_call>\n<tool_call>\n'
        f'{{"arguments": {_BERN}, "name": "time"}}\n</tool_call>\n',
        (("CONTENT", "Let me see."), *_call("weather", _PARIS), *_call("time", _BERN, 1)),
        2,
    ),
    Transcript(  # two in one pair of tags, and text behind
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {_PARIS}}}\n{{"name": "time"}}</tool_call> Done.',
        (*_call("weather", _PARIS), *_call("time", "{}", 1), ("CONTENT", "Done.")),
        2,
    ),
    Transcript(  # arguments as a string, and further members
        "hermes",
        '<tool_call>{"id": 7, "name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}", "x": [{}]}</tool_call>',
        _call("weather", _PARIS),
        1,
    ),
    Transcript(
        "hermes",
        "Calls stand in <tool_call> and </tool_call>.",
        (("CONTENT", "Calls stand in <tool_call> and </tool_call>."),),
        num_malformed=1,
    ),
    Transcript(
        "hermes",
        '<tool_call>{"nome": "weather"}</tool_call>',
        (("CONTENT", '<tool_call>{"nome": "weather"}</tool_call>'),),
        num_malformed=1,
    ),
    Transcript(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": 5}</tool_call>',
        (("CONTENT", '<tool_call>{"name": "weather", "arguments": 5}</tool_call>'),),
        num_malformed=1,
    ),
    Transcript(  # it goes wrong when the client knows of it already
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call> Sorry.',
        (*_call("weather", '{"city": '), ("CONTENT", "Paris}}Sorry.")),
        num_malformed=1,
    ),
    Transcript(  # one brace too many
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {_PARIS}}}}}</tool_call>',
        (*_call("weather", _PARIS), ("CONTENT", "}")),
        1,
    ),
    Transcript(
        "hermes", '<tool_call>{"name": "weather", "argu', (("CONTENT", '<tool_call>{"name": "weather", "argu'),), 0, 1
    ),
    Transcript(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        _call("weather", '{"city": "Par'),
        is_open=True,
    ),
    Transcript(
        "hermes", f'<tool_call>{{"name": "weather", "arguments": {_PARIS}}}\n</tool', _call("weather", _PARIS), 1
    ),
    Transcript(
        "qwen3",
        '<think>\nThe weather?\n<br>\n</think>\n\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        (("REASONING", "The weather?\n<br>"), *_call("time", "{}")),
        1,
    ),
    Transcript("qwen3", "<think>\n\n</think>\n\nHi.\n", (("CONTENT", "Hi.\n"),)),
    Transcript("qwen3", "Hi. I <think> so </think>.", (("CONTENT", "Hi. I <think> so </think>."),)),
    Transcript("qwen3", "<think>cut off </thi", (("REASONING", "cut off </thi"),)),
    Transcript("qwen3", "<thi", (("CONTENT", "<thi"),)),
    Transcript(
        "deepseek_r1",
        "Hm.\n</think>\n\nI call.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{_PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("REASONING", "Hm."), ("CONTENT", "I call."), *_call("weather", _PARIS), *_call("time", "{}", 1)),
        2,
        opens_in_prompt=True,
    ),
    Transcript(
        "deepseek_r1", "<think>\nHm.</think>Hi.", (("REASONING", "Hm."), ("CONTENT", "Hi.")), opens_in_prompt=True
    ),
    Transcript("deepseek_r1", "No end", (("REASONING", "No end"),), opens_in_prompt=True),
    Transcript(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_PARIS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time"
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (*_call("weather", _PARIS), *_call("time", "{}", 1)),
        2,
    ),
    Transcript(
        "llama3_json",
        f'{{"name": "weather", "parameters": {_PARIS}}}; {{"name": "time", "parameters": {{}}}}',
        (*_call("weather", _PARIS), *_call("time", "{}", 1)),
        2,
    ),
    Transcript("llama3_json", f'<|python_tag|>{{"name": "other", "parameters": {_PARIS}}}', _call("other", _PARIS), 1),
    Transcript("llama3_json", '{"city": "Paris"} ', (("CONTENT", '{"city": "Paris"} '),)),
    Transcript(
        "llama3_json",
        '\n{"name": "Paris", "arguments": {}}',  # an answer in JSON: there is no such function
        (("CONTENT", '\n{"name": "Paris", "arguments": {}}'),),
    ),
    Transcript("llama3_json", 'Say {"name": "time"}.', (("CONTENT", 'Say {"name": "time"}.'),)),
    Transcript(
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {_PARIS}}}, {{"name": "time", "arguments": {{}}}}]',
        (*_call("weather", _PARIS), *_call("time", "{}", 1)),
        2,
    ),
    Transcript("mistral", "[TOOL_CALLS] weather", (("CONTENT", "[TOOL_CALLS] weather"),), num_malformed=1),
    Transcript(
        "mistral_named",
        f"Well. [TOOL_CALLS]weather[ARGS]{_PARIS}[TOOL_CALLS]time{{}}",
        (("CONTENT", "Well."), *_call("weather", _PARIS), *_call("time", "{}", 1)),
        2,
    ),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis <b>\n\n</param\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
        _call("weather", '{"city": "Paris <b>\\n\\n</param", "days": 3, "exact": true}'),
        1,
    ),
    Transcript("qwen3_coder", "<tool_call>\n<function=time>\n</function>\n</tool_call>", _call("time", "{}"), 1),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
        _call("weather", '{"city": "Par'),
        is_open=True,
    ),
    Transcript(
        "qwen3_coder", "<tool_call>\n<funktion=time>", (("CONTENT", "<tool_call>\n<funktion=time>"),), num_malformed=1
    ),
)

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
