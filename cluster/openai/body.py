"""From the bytes of an HTTP request to a validated body, or to an error that names what is wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from cluster.api_error import ApiError
from cluster.openai.json_cost import has_more_values
from cluster.openai.object import TOGETHER, UNSUPPORTED
from cluster.openai.unsupported import refuse_unsupported

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig

Body = TypeVar("Body", bound=BaseModel)

# pydantic's error types in the words of JSON; others keep pydantic's own message.
_WORDS = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "extra_forbidden": "is not known",
}

# Several times what any API has: looking at each name is work that grows with the body.
_MAX_FIELDS = 256

_SUBJECT = re.compile(r"^(Input|List) should")


def parse_body(raw: bytes, content_type: str | None, model_class: type[Body], limits: LimitsConfig) -> Body:
    """Raises ApiError: 415 for another content type, 413 for too many bytes, 400 for everything else. What has too many
    values is refused before it is parsed.

    A missing content type is taken for JSON. Of duplicate keys the last one counts. NaN and Infinity, numbers beyond
    double precision, lone surrogates, invalid UTF-8 and more than 1,024 levels of nesting are not valid JSON here.
    """
    _check_content_type(content_type)
    if len(raw) > limits.max_body_bytes:
        message = f"the body has {len(raw)} bytes; at most {limits.max_body_bytes} are allowed"
        raise ApiError(413, message, code="body_too_large")
    if has_more_values(raw, limits.max_body_values):
        message = f"the body has more than {limits.max_body_values} values, where 16 numbers count as one"
        raise ApiError(400, message, code="too_many_values")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # The exception holds the whole document: it must not reach a log with the traceback.
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if len(body) > _MAX_FIELDS:
        raise ApiError(400, f"the body has {len(body)} fields; at most {_MAX_FIELDS} are allowed", code="invalid_value")
    return valid_body(body, model_class, limits)


def valid_body(body: dict[str, Any], model_class: type[Body], limits: LimitsConfig) -> Body:
    """The same of an object of JSON values. Raises ApiError 400.

    model_class: its class method `refuse`, if it has one, says which fields are not supported, instead of
    refuse_unsupported.
    """
    if (refuse := getattr(model_class, "refuse", None)) is not None:
        refuse(body)
    else:
        refuse_unsupported(body, getattr(model_class, "fields_elsewhere", {}))
    try:
        return model_class.model_validate(body, context=limits)
    except ValidationError as error:
        param, reason = what_is_wrong(error)
        is_unsupported = error.errors(include_url=False, include_input=False)[0]["type"] == UNSUPPORTED
    code = "unsupported" if is_unsupported else "invalid_value"
    raise ApiError(400, f"{param or 'the body'} {reason}", param=param or None, code=code)


def what_is_wrong(error: ValidationError) -> tuple[str, str]:
    """The field of the first problem, empty for the whole object, and what goes on after its name."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = first["ctx"]["param"] if first["type"] == TOGETHER else _path(first["loc"])
    return param, _WORDS.get(first["type"]) or _SUBJECT.sub("must", first["msg"])


def _check_content_type(content_type: str | None) -> None:
    """Only application/json, in UTF-8."""
    if not content_type:
        return
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    values = dict(parameter.partition("=")[::2] for parameter in parameters)
    if media_type != "application/json":
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
    if values.get("charset", "utf-8").strip('"') not in ("utf-8", "utf8"):
        raise ApiError(415, "the charset must be utf-8", code="unsupported_media_type")


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content". Names in <> are no fields, but of kinds of objects."""
    named = (step for step in location if not str(step).startswith("<"))
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in named)
    return "".join(steps).removeprefix(".")
