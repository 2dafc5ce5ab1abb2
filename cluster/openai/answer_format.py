"""Fields of a request body that say what the text of an answer must look like, under OpenAI's and vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from cluster.grammars.grammar_source import GrammarKind, GrammarSource
from cluster.openai.object import OpenAIObject, invalid, limit, limits_of, not_together, texts

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
_SCHEMA_EXAMPLE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_GRAMMAR_EXAMPLE = 'start: "yes" | "no"'


def _schema(value: Any, info: ValidationInfo) -> str:
    """A schema as JSON again: that is what is compiled, and what a schema seen before is known by."""
    if not isinstance(value, dict):
        raise invalid("must be an object")
    try:
        text = orjson.dumps(value)
    except TypeError:  # deeper than orjson writes
        raise invalid("is nested too deeply") from None
    _check_size(len(text), info)
    return text.decode()


def _schema_or_text(value: Any, info: ValidationInfo) -> str:
    """vLLM also takes a schema that is written as a string."""
    if not isinstance(value, str):
        return _schema(value, info)
    _check_size(len(value), info)
    try:
        return _schema(orjson.loads(value), info)
    except orjson.JSONDecodeError:
        raise invalid("must be an object, or one written as a JSON string") from None


def _expression(value: Any, info: ValidationInfo) -> str:
    if not isinstance(value, str):
        raise invalid("must be a string")
    if not value:
        raise invalid("must not be empty")
    _check_size(len(value.encode()), info)
    return value


def _choices(value: Any, info: ValidationInfo) -> str:
    limits = limits_of(info)
    found = texts(value, limits.max_enum_values, limits.max_grammar_bytes)
    if not found:
        raise invalid("must not be empty")
    text = orjson.dumps(found)
    _check_size(len(text), info)
    return text.decode()


def _check_size(num_bytes: int, info: ValidationInfo) -> None:
    most = limits_of(info).max_grammar_bytes
    if num_bytes > most:
        raise invalid(f"has {num_bytes} bytes; at most {most} are allowed")


def _only_true(value: Any) -> Any:
    if value is False:
        raise invalid("must be true, or left out")
    return value


_OBJECT: dict[str, Any] = {"type": "object"}
_TEXT = {"type": "string", "minLength": 1, "maxLength": limit("max_grammar_bytes")}
_CHOICES = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "maxItems": limit("max_enum_values"),
}
_Schema = Annotated[str, PlainValidator(_schema), WithJsonSchema(_OBJECT)]
_SchemaOrText = Annotated[
    str, PlainValidator(_schema_or_text), WithJsonSchema({"anyOf": [_OBJECT, {"type": "string", "minLength": 1}]})
]
_Expression = Annotated[str, PlainValidator(_expression), WithJsonSchema(_TEXT)]
_Choices = Annotated[str, PlainValidator(_choices), WithJsonSchema(_CHOICES)]
_True = Annotated[bool, BeforeValidator(_only_true), WithJsonSchema({"const": True})]


def _not_supported(value: Any) -> None:
    """A field of vLLM's that is known: whatever asks for something is refused by its name."""
    if value is not False:
        raise invalid("is not supported: leave it out")


_NotSupported = Annotated[None, PlainValidator(_not_supported), WithJsonSchema({"enum": [False, None]})]


class JsonSchemaFormat(OpenAIObject):
    """The schema that an answer follows."""

    name: str = Field(pattern=_NAME, description="Your name for the schema; it changes nothing.", examples=["capital"])
    text: _Schema = Field(
        alias="schema",
        description="The JSON Schema (2020-12). The answer has the keys in the schema's order. A keyword that can't be "
        "followed is refused by name.",
        examples=[_SCHEMA_EXAMPLE],
    )
    strict: bool = Field(
        default=True,
        description="The schema is followed in any case, and need not be of OpenAI's strict subset. false: a format "
        "that is not known says nothing, else it is refused.",
        examples=[True],
    )
    description: str | None = Field(
        default=None, description="What the answer is for; the model is not shown it.", examples=["A capital city"]
    )


class ResponseFormat(OpenAIObject):
    """What the text of an answer is."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything. json_object: a JSON object; ask for one in a message too. json_schema: JSON that "
        "follows a schema.",
        examples=["json_object"],
    )
    json_schema: JsonSchemaFormat | None = Field(
        default=None, description="The schema, for type json_schema.", examples=[None]
    )

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise not_together("response_format.json_schema", "is required with type json_schema")
        return self


class StructuredOutputs(OpenAIObject):
    """vLLM's field of that name: one of the first five."""

    model_config = ConfigDict(extra="forbid")  # else a name that is misspelt would leave the answer free

    schema_text: _SchemaOrText | None = Field(
        default=None,
        alias="json",
        description="A JSON Schema that the answer follows, as an object or as a JSON string.",
        examples=[_SCHEMA_EXAMPLE],
    )
    regex: _Expression | None = Field(
        default=None,
        description="A regular expression that the whole answer matches, in the syntax of Rust's crate regex.",
        examples=["[0-9]{4}"],
    )
    choice: _Choices | None = Field(
        default=None, description="Texts of which the answer is one.", examples=[["yes", "no"]]
    )
    grammar: _Expression | None = Field(
        default=None,
        description="A context-free grammar that the answer follows, in llguidance's Lark (rule start) or in GBNF "
        "(rule root).",
        examples=[_GRAMMAR_EXAMPLE],
    )
    json_object: _True | None = Field(default=None, description="The answer is a JSON object.", examples=[True])
    structural_tag: _NotSupported = Field(default=None, description="Not supported.", examples=[None])
    whitespace_pattern: _NotSupported = Field(default=None, description="Not supported.", examples=[None])
    disable_fallback: bool = Field(default=False, description="Ignored: nothing falls back here.", examples=[False])
    disable_any_whitespace: _NotSupported = Field(default=None, description="Not supported.", examples=[False])
    disable_additional_properties: _NotSupported = Field(default=None, description="Not supported.", examples=[False])


class FormatFields(OpenAIObject):
    """What an answer must look like; at most one of these."""

    response_format: ResponseFormat | None = Field(
        default=None,
        description="What the text of the answer is: by type text, json_object or json_schema. The model's own end of "
        "an answer then counts even with ignore_eos, and with min_tokens where nothing else may follow; max_tokens and "
        "stop may cut the answer.",
        examples=[{"type": "json_schema", "json_schema": {"name": "capital", "schema": _SCHEMA_EXAMPLE}}],
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None,
        description="The same in vLLM's words: one of json, regex, choice, grammar and json_object. Not in OpenAI's "
        "API.",
        examples=[{"regex": "[0-9]{4}"}],
    )
    guided_json: _SchemaOrText | None = Field(
        default=None,
        description="An older name for structured_outputs.json. Not in OpenAI's API.",
        examples=[_SCHEMA_EXAMPLE],
    )
    guided_regex: _Expression | None = Field(
        default=None,
        description="An older name for structured_outputs.regex. Not in OpenAI's API.",
        examples=["[0-9]{4}"],
    )
    guided_choice: _Choices | None = Field(
        default=None,
        description="An older name for structured_outputs.choice. Not in OpenAI's API.",
        examples=[["yes", "no"]],
    )
    guided_grammar: _Expression | None = Field(
        default=None,
        description="An older name for structured_outputs.grammar. Not in OpenAI's API.",
        examples=[_GRAMMAR_EXAMPLE],
    )
    guided_decoding_backend: str | None = Field(
        default=None,
        description="Ignored: there is one, whose answers follow the same schemas. Not in OpenAI's API.",
        examples=["auto"],
    )

    @property
    def answer_format(self) -> tuple[str, GrammarSource] | None:
        """The field that says what the answer must look like, and what it says; None: anything."""
        return next(iter(_asked_for(self)), None)


def check_formats(body: FormatFields) -> None:
    """Raises PydanticCustomError, naming the later field, where more than one of them asks for something."""
    if body.structured_outputs is not None and len(_of_structured_outputs(body.structured_outputs)) > 1:
        raise not_together("structured_outputs", "must have only one of json, regex, choice, grammar and json_object")
    if len(asked := _asked_for(body)) > 1:
        raise not_together(asked[1][0], f"is not allowed together with {asked[0][0]}")


def _asked_for(body: FormatFields) -> list[tuple[str, GrammarSource]]:
    found: list[tuple[str, GrammarSource]] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(("response_format", GrammarSource("json_object", "")))
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        source = GrammarSource("json_schema", form.json_schema.text, is_lenient=not form.json_schema.strict)
        found.append(("response_format.json_schema.schema", source))
    if body.structured_outputs is not None:
        found += _of_structured_outputs(body.structured_outputs)
    older: tuple[tuple[str, GrammarKind, str | None], ...] = (
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    )
    return found + [(name, GrammarSource(kind, text)) for name, kind, text in older if text is not None]


def _of_structured_outputs(asked: StructuredOutputs) -> list[tuple[str, GrammarSource]]:
    texts_by_name: tuple[tuple[str, GrammarKind, str | None], ...] = (
        ("json", "json_schema", asked.schema_text),
        ("regex", "regex", asked.regex),
        ("choice", "choice", asked.choice),
        ("grammar", "grammar", asked.grammar),
        ("json_object", "json_object", "" if asked.json_object else None),
    )
    return [
        (f"structured_outputs.{name}", GrammarSource(kind, text))
        for name, kind, text in texts_by_name
        if text is not None
    ]
