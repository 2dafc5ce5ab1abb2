"""Options in a body of POST /v1/responses: what the text is like, how the model thinks, what a stream has."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from cluster.openai.object import OpenAIObject, not_together, unsupported
from cluster.openai.request import ReasoningEffort


class TextFormat(OpenAIObject):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON by a schema.", examples=["text"]
    )
    name: str | None = Field(default=None, description="For json_schema: its name.", examples=["city"])
    description: str | None = Field(default=None, description="For json_schema: what it is for.", examples=["A city"])
    json_schema: dict[str, Any] | None = Field(
        default=None, alias="schema", description="For json_schema: the schema.", examples=[{"type": "object"}]
    )
    strict: bool | None = Field(default=None, description="For json_schema: as OpenAI has it.", examples=[True])

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        for name, value in (("name", self.name), ("schema", self.json_schema)):
            if self.type == "json_schema" and value is None:
                raise not_together(f"text.format.{name}", "is required together with type json_schema")
        return self

    def shown(self) -> dict[str, Any]:
        """As a response repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return self.model_dump(by_alias=True)


def _verbosity(value: Any) -> Any:
    if value in ("low", "high"):
        raise unsupported("may only be medium: say in the instructions how much to write")
    return value


class TextOptions(OpenAIObject):
    """The form of the text."""

    format: TextFormat = Field(
        default_factory=lambda: TextFormat(type="text"),
        description="Any text, if left out.",
        examples=[{"type": "text"}],
    )
    verbosity: Annotated[Literal["medium"], BeforeValidator(_verbosity)] = Field(
        default="medium", description="Only the usual one: say in the instructions how much to write.",
        examples=["medium"],
    )  # fmt: skip


def _summary(value: Any) -> Any:
    if value in ("concise", "detailed"):
        raise unsupported("may only be auto: reasoning comes as it is, not summarised")
    return value


_Summary = Annotated[Literal["auto"], BeforeValidator(_summary)]


class ReasoningOptions(OpenAIObject):
    """How the model thinks, if it is one that does."""

    effort: ReasoningEffort | None = Field(
        default=None,
        description="As reasoning_effort in chat completions: for the model's chat template, which heeds it or not.",
        examples=["low"],
    )
    summary: _Summary | None = Field(
        default=None,
        description="Nothing is summarised here: the reasoning itself comes, as content of an item.",
        examples=["auto"],
    )
    generate_summary: _Summary | None = Field(default=None, description="Older name of summary.", examples=["auto"])
    context: Literal["auto"] | None = Field(
        default=None, description="Which reasoning of earlier turns counts is up to the template.", examples=["auto"]
    )
    mode: Literal["standard"] | None = Field(
        default=None, description="There is only the usual one.", examples=["standard"]
    )


class ResponseStreamOptions(OpenAIObject):
    """Options of a stream."""

    include_obfuscation: Literal[False] = Field(
        default=False, description="Events are not padded: only false.", examples=[False]
    )
