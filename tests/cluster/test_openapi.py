"""The published description is true: schemathesis sends what it allows and what it does not, and reads every answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cluster.config.limits import LimitsConfig
from cluster.http.api_schemas import ChatCompletionChunk, CompletionChunk
from cluster.http.response_schemas import ResponseEvent
from cluster.openai.request import ChatCompletionBody, CompletionBody
from cluster.openai.responses.refused import REFUSED
from cluster.openai.responses.request import LOGPROBS, ResponsesBody
from cluster.openai.unsupported import NEUTRAL_VALUES
from tests.cluster.api_client import CHAT, RESPONSES, TEXT, api_client, events_in
from tests.cluster.fake_ingress import FakeIngress
from tests.cluster.letter_source import LetterSource

LIMITS = {"max_choices": 3, "max_prompts": 2, "max_stop_strings": 2, "max_bad_words": 2, "max_logit_bias": 3}
LIMITS["max_text_chars"] = 600  # else a list that is too long is half a million entries
# Whether valid data must be accepted is not asked: a token id may be unknown, fields may not go together.
CONFORMANCE = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
POSTS = [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"]
GETS = ["/v1/models", "/v1/models/{model}", "/health", "/health/ready", "/version", "/metrics"]


def run_examples(path: str, mode: GenerationMode, seed_: int, num_examples: int) -> Counter[int]:
    """How often each status came."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", FakeIngress(LetterSource(), **LIMITS).app())
    operation = schema[path]["GET" if path in GETS else "POST"]
    is_negative = mode is GenerationMode.NEGATIVE
    checks = [*CONFORMANCE, *([negative_data_rejection] if is_negative else [])]
    statuses: Counter[int] = Counter()

    @seed(seed_)
    @settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    run()
    return statuses


@pytest.mark.parametrize("seed_", [1, pytest.param(None, id="random", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("path", POSTS)
def test_valid_bodies_get_what_is_described(path: str, seed_: int | None) -> None:
    chosen = random.randrange(2**32) if seed_ is None else seed_
    print("seed", chosen)
    statuses = run_examples(path, GenerationMode.POSITIVE, chosen, 20)
    assert set(statuses) <= {200, 400, 404}
    assert statuses.total() > 10  # that valid bodies are accepted: test_examples_are_accepted


@pytest.mark.parametrize("seed_", [2, pytest.param(None, id="random", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("path", POSTS)
def test_invalid_bodies_are_refused(path: str, seed_: int | None) -> None:
    chosen = random.randrange(2**32) if seed_ is None else seed_
    print("seed", chosen)
    statuses = run_examples(path, GenerationMode.NEGATIVE, chosen, 20)
    assert statuses.total() > 10
    assert 500 not in statuses


@pytest.mark.parametrize("path", GETS)
def test_what_takes_no_body(path: str) -> None:
    assert set(run_examples(path, GenerationMode.POSITIVE, 3, 10)) <= {200, 400, 404}


# -- the document ----------------------------------------------------------------------------------


async def document(sections: dict[str, Any] | None = None, **limits: int) -> dict[str, Any]:
    async with api_client(sections, **limits) as c:
        content: dict[str, Any] = (await c.http.get("/openapi.json")).json()
        return content


async def test_every_field_of_a_request_is_described_with_an_example() -> None:
    schemas = (await document())["components"]["schemas"]
    for model in (ChatCompletionBody, CompletionBody):
        properties = schemas[model.__name__]["properties"]
        assert properties.keys() == model.model_fields.keys() | NEUTRAL_VALUES.keys()
    known = ResponsesBody.model_fields.keys() | REFUSED.keys()
    assert schemas["ResponsesBody"]["properties"].keys() == known | schemas["ChatCompletionBody"]["properties"].keys()
    requests = ("Body", "Options", "ChatMessage", "Call", "FunctionTool", "TextFormat", "InputMessage", "CallOutput")
    bodies = {
        name: schema
        for name, schema in schemas.items()
        if name.endswith(requests) and name[:6] not in ("Answer", "Output")
    }
    assert len(bodies) >= 16
    for name, schema in bodies.items():
        for field, described in schema["properties"].items():
            if "$ref" in described:
                continue
            assert len(described.get("description", "")) > 10, (name, field)
            assert described.get("examples"), (name, field)


async def test_examples_are_accepted() -> None:
    schemas = (await document())["components"]["schemas"]
    needs: dict[str, Any] = {
        "top_logprobs": {"logprobs": True},
        "stream_options": {"stream": True},
        "best_of": {"n": 1},
    }

    def needs_of(path: str, field: str) -> dict[str, Any]:
        if path == RESPONSES and field == "top_logprobs":
            return {"include": [LOGPROBS]}
        return needs.get(field, {})

    only_of_models_that_think = {"thinking_token_budget"}
    async with api_client() as c:
        for path, name in ((CHAT, "ChatCompletionBody"), (TEXT, "CompletionBody"), (RESPONSES, "ResponsesBody")):
            short = "max_output_tokens" if path == RESPONSES else "max_tokens"
            for field, described in schemas[name]["properties"].items():
                if field in only_of_models_that_think:
                    continue
                for example in described["examples"]:
                    response = await c.send(path, {short: 20, **needs_of(path, field), field: example})
                    assert response.status_code == 200, (field, example, response.text)


async def test_limits_are_those_of_the_config() -> None:
    def numbers(schema: dict[str, Any]) -> list[int]:
        properties = schema["components"]["schemas"]["CompletionBody"]["properties"]
        n, logprobs = (properties[name]["anyOf"][0]["maximum"] for name in ("n", "logprobs"))
        prompts = properties["prompt"]["anyOf"][1]["maxItems"]
        stops = properties["stop"]["anyOf"][0]["anyOf"][1]["maxItems"]
        return [n, logprobs, prompts, stops, properties["logit_bias"]["anyOf"][0]["maxProperties"]]

    assert numbers(await document()) == [8, 5, 32, 4, 300]
    changed = {"max_choices": 2, "max_logprobs": 7, "max_prompts": 3, "max_stop_strings": 1, "max_logit_bias": 9}
    assert numbers(await document(**changed)) == [2, 7, 3, 1, 9]
    assert "$limit" not in json.dumps(await document())
    assert LimitsConfig().max_top_logprobs == 20


async def test_the_description_and_its_page_can_be_switched() -> None:
    for server, statuses in [
        ({}, (200, 404)),
        ({"openapi": False, "docs": True}, (404, 404)),
        ({"docs": True}, (200, 200)),
    ]:
        async with api_client({"server": server}) as c:
            got = tuple([(await c.http.get(path)).status_code for path in ("/openapi.json", "/docs")])
            assert got == statuses


@pytest.mark.parametrize("fields", [{}, {"n": 2, "stop": "a"}, {"stream_options": {"include_usage": True}},
                                    {"return_token_ids": True}, {"logprobs": 2}])  # fmt: skip
async def test_events_of_streams_are_as_described(fields: dict[str, Any]) -> None:
    async with api_client() as c:
        for path, model in ((CHAT, ChatCompletionChunk), (TEXT, CompletionChunk)):
            asked = {"logprobs": True, "top_logprobs": 2} if path == CHAT and "logprobs" in fields else fields
            events = events_in((await c.send(path, {"max_tokens": 9, **asked}, stream=True)).content)
            for event in events[:-1]:
                model.model_validate(event, strict=True)
            # How many tokens share an event is a matter of time: each choice has at least the one that ends it.
            ended = [choice["index"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
            assert sorted(ended) == list(range(fields.get("n", 1)))
            assert events[-1] == "[DONE]"


async def test_events_of_a_streamed_response_are_as_described() -> None:
    async with api_client() as c:
        for fields in ({}, {"include": [LOGPROBS], "top_logprobs": 2}):
            content = (await c.send(RESPONSES, {"max_output_tokens": 9, **fields}, stream=True)).content
            events = [json.loads(block.split(b"\ndata: ")[1]) for block in content.split(b"\n\n")[:-1]]
            for event in events:
                ResponseEvent.model_validate(event, strict=True)
            assert events[-1]["type"] == "response.incomplete"
