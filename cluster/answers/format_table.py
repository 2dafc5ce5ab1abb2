"""How known families of models write calls of tools and what they think. A new family is new rows here.

Sources: the families' published chat templates and model cards, and vLLM's list of parsers by the same names
(docs/features/tool_calling.md and reasoning_outputs.md).
"""

from __future__ import annotations

from cluster.answers.answer_format import CallBody, CallSyntax, FormatRow, ReasoningTags

THINK = ReasoningTags("<think>", "</think>")

HERMES = CallSyntax("hermes", CallBody.JSON, "<tool_call>", "</tool_call>", before_body="\n", after_body="\n")
_QWEN3_CODER = CallSyntax("qwen3_coder", CallBody.XML, "<tool_call>", "</tool_call>", before_body="\n", after_body="\n")
_LLAMA3_JSON = CallSyntax(
    "llama3_json", CallBody.JSON, "<|python_tag|>", between="; ", arguments_key="parameters", is_bare=True
)
_MISTRAL = CallSyntax("mistral", CallBody.JSON_LIST, "[TOOL_CALLS]", between=", ", has_short_ids=True)
_MISTRAL_NAMED = CallSyntax(
    "mistral_named", CallBody.NAMED, "[TOOL_CALLS]", name_end="[ARGS]", between="", has_short_ids=True
)
_DEEPSEEK_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_R1 = CallSyntax(
    "deepseek_r1",
    CallBody.NAMED,
    "<｜tool▁call▁begin｜>",
    "```<｜tool▁call▁end｜>",
    before_name="function<｜tool▁sep｜>",
    name_end="\n```json\n",
    after_body="\n",
    around=_DEEPSEEK_AROUND,
)
_DEEPSEEK_V31 = CallSyntax(
    "deepseek_v31",
    CallBody.NAMED,
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    name_end="<｜tool▁sep｜>",
    between="",
    around=_DEEPSEEK_AROUND,
)

# The first row whose marks a chat template has all of is how its model writes. Rows of what they think are for any
# model whose template names the tags; a config may name either.
CALL_ROWS = (
    FormatRow("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), THINK, _QWEN3_CODER),
    FormatRow("hermes", ("<tool_call>",), None, HERMES),
    FormatRow("deepseek_r1", ("<｜tool▁call▁begin｜>", "```json"), THINK, _DEEPSEEK_R1),
    FormatRow("deepseek_v31", ("<｜tool▁call▁begin｜>",), THINK, _DEEPSEEK_V31),
    FormatRow("mistral_named", ("[TOOL_CALLS]", "[ARGS]"), None, _MISTRAL_NAMED),
    FormatRow("mistral", ("[TOOL_CALLS]",), None, _MISTRAL),
    FormatRow("llama3_json", ("<|start_header_id|>", "tool_calls", '"parameters": '), None, _LLAMA3_JSON),
)
REASONING_ROWS = (
    FormatRow("think", (), THINK),
    FormatRow("magistral", (), ReasoningTags("[THINK]", "[/THINK]")),
    FormatRow("seed_think", (), ReasoningTags("<seed:think>", "</seed:think>")),
)
# For the config only: both at once, by the name of a family.
_NAMED_ROWS = (FormatRow("qwen3", (), THINK, HERMES),)

ROWS = {row.name: row for row in (*CALL_ROWS, *REASONING_ROWS, *_NAMED_ROWS)}
PARSER_NAMES = tuple(dict.fromkeys(row.calls.name for row in CALL_ROWS if row.calls is not None))


def calls_in(template: str) -> CallSyntax | None:
    """How a model with this chat template writes calls; None: in no way that is known."""
    return next((row.calls for row in CALL_ROWS if _has(template, row)), None)


def reasoning_in(template: str) -> ReasoningTags | None:
    """How a model with this chat template writes what it thinks; None: it does not think. Either tag will do."""
    tags = (row.reasoning for row in REASONING_ROWS if row.reasoning is not None)
    return next((each for each in tags if each.opener in template or each.closer in template), None)


def _has(template: str, row: FormatRow) -> bool:
    """JSON in a template's own words may have its quotes escaped."""
    plain = template.replace('\\"', '"')
    return all(mark in plain for mark in row.marks)
