"""What the objects of a request body have in common: strictness, and types that several fields use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig

# In a JSON schema, stands for a number of the config's limits: {"maximum": {LIMIT: "max_choices"}}.
LIMIT = "$limit"
# The type of an error between fields; its context names the one to change.
TOGETHER = "together"
# The type of an error about what is understood, and not done here.
UNSUPPORTED = "unsupported"


def invalid(message: str) -> PydanticCustomError:
    """An error whose message goes on after the field's name. It must not quote what the client sent."""
    return PydanticCustomError("invalid", message)


def unsupported(message: str) -> PydanticCustomError:
    """As `invalid`, for what is understood and not done here: the error's code says so."""
    return PydanticCustomError(UNSUPPORTED, message)


def not_together(param: str, message: str) -> PydanticCustomError:
    """The same for a validator of the whole object, which says by itself which field it is about."""
    return PydanticCustomError(TOGETHER, message, {"param": param})


def limits_of(info: ValidationInfo) -> LimitsConfig:
    return cast("LimitsConfig", info.context)


def integral(value: Any) -> Any:
    """5.0 as 5. Not beyond 2**53: there a float stands for several integers, and JSON's larger ones come as floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


def token_ids(value: Any, most: int | None = None) -> list[int]:
    """A list of integers, of so many at most; whether the vocabulary has them is the tokenizer's business."""
    if not isinstance(value, list):
        raise invalid("must be an array of token ids")
    if most is not None and len(value) > most:
        raise invalid(f"has {len(value)} ids; at most {most} are allowed")
    # A body may hold millions: what is looked at one by one in Python is only what has floats among it.
    types = set(map(type, value))
    if not types <= {int, float}:
        raise invalid("must be an array of integers")
    if float not in types:
        return value
    ids = [integral(item) for item in value]
    if set(map(type, ids)) != {int}:
        raise invalid("must be an array of integers")
    return ids


def texts(value: Any, most: int, most_chars: int, blanks: str | None = None) -> list[str]:
    """A list of strings, of so many at most, none longer than most_chars, none empty. blanks: characters that do not
    count for that.
    """
    if not isinstance(value, list):
        raise invalid("must be an array of strings")
    if len(value) > most:
        raise invalid(f"has {len(value)} strings; at most {most} are allowed")
    if not all(isinstance(text, str) for text in value):
        raise invalid("must be an array of strings")
    if not all(text.strip(blanks) if blanks else text for text in value):
        raise invalid("must not contain an empty string")
    if max(map(len, value), default=0) > most_chars:
        raise invalid(f"has a string of more than {most_chars} characters")
    return value


@dataclass(frozen=True, slots=True)
class OfVocabulary:
    """Annotates a list, or an object by its keys: they are token ids, and whoever has the tokenizer checks them."""


def token_ids_schema(**bounds: Any) -> dict[str, Any]:
    """JSON schema of a list of token ids."""
    return {"type": "array", "items": {"type": "integer", "minimum": 0}, **bounds}


def limit(name: str) -> dict[str, str]:
    """A bound in a JSON schema that a key of the config's limits sets."""
    return {LIMIT: name}


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotates a number, a text, a list or an object: a key of the config's limits bounds its value or its length."""

    name: str
    keyword: Literal["maximum", "maxItems", "maxProperties", "maxLength"] = "maximum"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {self.keyword: limit(self.name)}

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        most = getattr(limits_of(info), self.name)
        if self.keyword == "maximum" and value > most:
            raise invalid(f"must be at most {most}")
        if self.keyword != "maximum" and len(value) > most:
            unit = "characters" if self.keyword == "maxLength" else "entries"
            raise invalid(f"has {len(value)} {unit}; at most {most} are allowed")
        return value


Integer = Annotated[int, BeforeValidator(integral), Field(strict=True)]


class OpenAIObject(BaseModel):
    """Strict types; null means the same as leaving a field out; what is not known is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}
