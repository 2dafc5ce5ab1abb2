"""The description of the HTTP API that /openapi.json publishes: from the models that bodies are checked with, and with
the limits of this server's config in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.http import api_schemas as answers
from cluster.http.response_schemas import Response, ResponseEvent
from cluster.openai.generation_body import GenerationBody
from cluster.openai.object import LIMIT
from cluster.openai.request import ChatCompletionBody, CompletionBody
from cluster.openai.responses.refused import REFUSED
from cluster.openai.responses.request import ResponsesBody
from cluster.openai.tokenize_request import DetokenizeBody, TokenizeBody
from cluster.openai.unsupported import NEUTRAL_VALUES
from cluster.version import VERSION

if TYPE_CHECKING:
    from cluster.config.access import AuthConfig
    from cluster.config.limits import LimitsConfig

_REF = "#/components/schemas/{model}"
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_ERRORS = {
    "400": "Something in the request is wrong or not supported; the message says what.",
    "401": "An API key is needed.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The content type is not application/json in UTF-8.",
    "429": "Too much is waiting; try again after Retry-After seconds.",
    "500": "The request failed here.",
    "503": "No replica is available; try again after Retry-After seconds.",
    "504": "The request's time is up.",
}
_OF_ALL = ("401", "500")
_OF_BODIES = ("400", "401", "404", "408", "413", "415", "500")
_OF_GENERATION = (*_OF_BODIES, "429", "503", "504")


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    errors: tuple[str, ...] = _OF_ALL


_OPERATIONS = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        answers.ChatCompletion,
        ChatCompletionBody,
        answers.ChatCompletionChunk,
        _OF_GENERATION,
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Continue a text",
        answers.Completion,
        CompletionBody,
        answers.CompletionChunk,
        _OF_GENERATION,
    ),
    _Operation(
        "post",
        "/v1/responses",
        "Answer a conversation, given and answered as items; nothing is stored",
        Response,
        ResponsesBody,
        ResponseEvent,
        _OF_GENERATION,
    ),
    _Operation("get", "/v1/models", "The model that is served", answers.ModelList),
    _Operation("get", "/v1/models/{model}", "The model, by its name", answers.ModelCard, errors=("404", *_OF_ALL)),
    _Operation("post", "/tokenize", "Text to token ids", answers.TokenizeAnswer, TokenizeBody, errors=_OF_BODIES),
    _Operation("post", "/detokenize", "Token ids to text", answers.DetokenizeAnswer, DetokenizeBody, errors=_OF_BODIES),
    _Operation("get", "/health", "Whether the process is up", answers.Health),
    _Operation("get", "/health/ready", "Whether requests can be served", answers.Readiness),
    _Operation("get", "/version", "Version of the server", answers.Version),
    _Operation("get", "/metrics", "Metrics in Prometheus' format", None),
)


def openapi_document(
    limits: LimitsConfig, auth: AuthConfig, model_name: str, defaults: Mapping[str, float]
) -> dict[str, Any]:
    """OpenAPI 3.1. limits: what fields may have here. auth: which operations need a key, if any do. defaults: of fields
    that say how tokens are chosen, where the checkpoint has others than OpenAI.
    """
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "SplitServe",
            "version": VERSION,
            "description": "LLM inference, compatible with OpenAI's API. null means the same as leaving a field out; "
            "fields that are not known are ignored.",
        },
        "paths": {},
        "components": {"schemas": _schemas(limits, model_name, defaults)},
    }
    if auth.is_on:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for operation in _OPERATIONS:
        described = _describe(operation)
        if auth.is_on and operation.path not in auth.public_paths:
            described["security"] = [{"key": []}]
        document["paths"].setdefault(operation.path, {})[operation.method] = described
    return document


# -- operations ------------------------------------------------------------------------------------


def _describe(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.replace("/", "_").replace("{", "").replace("}", ""),
        "parameters": [_request_id_parameter()],
        "responses": {"200": _success(operation)},
    }
    if "{model}" in operation.path:
        described["parameters"].append(
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        )
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(operation.body)}}}
    for status in ("400", *(status for status in operation.errors if status != "400")):
        described["responses"][status] = _failure(status)
    if operation.answer is answers.Readiness:
        described["responses"]["503"] = _success(operation) | {"description": "Some pool has none."}
    return described


def _success(operation: _Operation) -> dict[str, Any]:
    if operation.answer is None:
        content = {_TEXT: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": _ref(operation.answer)}}
    if operation.event is not None:
        # What one event's data is. JSON schema has no word for the stream of them, and readers of the document differ
        # in whether a schema here is of the whole text or of each event.
        content[_EVENTS] = {"schema": {}, "x-event-data": _ref(operation.event)}
    return {"description": "Success", "headers": _request_id_header(), "content": content}


def _failure(status: str) -> dict[str, Any]:
    headers = _request_id_header()
    if status in ("429", "503"):
        headers["Retry-After"] = {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}
    return {
        "description": _ERRORS[status],
        "headers": headers,
        "content": {_JSON: {"schema": _ref(answers.ErrorEnvelope)}},
    }


def _request_id_parameter() -> dict[str, Any]:
    return {
        "name": "X-Request-Id",
        "in": "header",
        "description": "Your name for the request, given back and logged; left out: one of ours.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
    }


def _request_id_header() -> dict[str, Any]:
    return {"X-Request-Id": {"description": "The request's name", "schema": {"type": "string"}, "required": True}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


# -- schemas ---------------------------------------------------------------------------------------


def _schemas(limits: LimitsConfig, model_name: str, defaults: Mapping[str, float]) -> dict[str, Any]:
    bodies: list[type[BaseModel]] = [operation.body for operation in _OPERATIONS if operation.body is not None]
    others: list[type[BaseModel]] = [
        model for operation in _OPERATIONS for model in (operation.answer, operation.event) if model is not None
    ]
    _, request_part = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    others.append(answers.ErrorEnvelope)
    _, answer_part = models_json_schema([(model, "serialization") for model in others], ref_template=_REF)
    requests: dict[str, Any] = _with_limits(request_part["$defs"], limits)
    for schema in requests.values():
        _accept_nulls(schema)
    for model in bodies:
        schema = requests[model.__name__]
        schema["properties"]["model"] |= {"examples": [model_name]}
        if issubclass(model, GenerationBody):
            schema["properties"] |= {name: _refused(neutral) for name, neutral in NEUTRAL_VALUES.items()}
            for name, value in defaults.items():
                schema["properties"][name] |= {"default": value}
    _add_fields_of_chat(requests)
    return {**requests, **answer_part["$defs"]}


def _add_fields_of_chat(requests: dict[str, Any]) -> None:
    """Mutates: a responses body takes what a chat body does, but for what has another name there, or no place."""
    own = requests[ResponsesBody.__name__]["properties"]
    chat = requests[ChatCompletionBody.__name__]["properties"]
    own |= {name: field for name, field in chat.items() if name not in own and name not in REFUSED}
    own |= {name: _refused(refused.neutral, refused.instead) for name, refused in REFUSED.items()}


def _with_limits(schema: Any, limits: LimitsConfig) -> Any:
    """A copy with the config's numbers in place of their names."""
    if isinstance(schema, dict):
        if LIMIT in schema:
            return getattr(limits, schema[LIMIT])
        return {key: _with_limits(value, limits) for key, value in schema.items()}
    return [_with_limits(item, limits) for item in schema] if isinstance(schema, list) else schema


def _accept_nulls(schema: dict[str, Any]) -> None:
    """Mutates: every field that may be left out may be null. Its description stays in sight."""
    for name, field in schema.get("properties", {}).items():
        if name in schema.get("required", []) or {"type": "null"} in field.get("anyOf", []):
            continue
        outside = {key: field.pop(key) for key in ("description", "examples", "default", "title") if key in field}
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **outside}


def _refused(neutral: tuple[Any, ...], instead: str = "only values that ask for nothing.") -> dict[str, Any]:
    """A field that is known, and refused unless it asks for nothing."""
    allowed = [*neutral, None]
    return {"enum": allowed, "description": f"Not supported: {instead}", "examples": [allowed[0]]}
