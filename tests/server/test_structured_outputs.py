"""Answers that follow a schema or grammar, from a real server, by OpenAI's client and by plain HTTP."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import API_KEY
from tests.server.running_server import RunningServer

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [{"role": "user", "content": "Tell me about the city of Paris."}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "kind": {"enum": ["city", "town", "village"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "population", "kind", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}

pytestmark = pytest.mark.slow


class Place(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


class City(BaseModel):
    kind: Literal["city", "town"]
    place: Place
    nickname: str | None = Field(max_length=12)


@pytest.fixture(scope="module")
def client(api_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY, max_retries=0)


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/{path}", json=fields, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120
    )


def text_of(server: RunningServer, **fields: Any) -> tuple[str, str]:
    """Of a chat: its text and how it ended."""
    response = post(server, "chat/completions", messages=MESSAGES, temperature=0, **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def test_openais_client_parses_into_a_pydantic_model(client: openai.OpenAI) -> None:
    for temperature in (0, 1):
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=City, temperature=temperature, seed=3, max_tokens=120
        )
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, City)
        assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_answer_is_the_same_and_parsed_as_it_comes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    whole = client.chat.completions.create(response_format=FORM, **asked).choices[0].message.content
    jsonschema.validate(json.loads(whole or ""), CITY)
    chunks = client.chat.completions.create(response_format=FORM, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    with client.chat.completions.stream(response_format=City, **asked) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, City)


def test_each_form_is_followed(api_server: RunningServer) -> None:
    for fields, follows in (
        ({"response_format": {"type": "json_object"}, "max_tokens": 180}, None),
        ({"guided_json": CITY}, lambda text: jsonschema.validate(json.loads(text), CITY) is None),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, lambda text: json.loads(text)["kind"] in text),
        ({"guided_regex": "[A-Z]{3}-[0-9]{4}"}, re.compile("[A-Z]{3}-[0-9]{4}").fullmatch),
        ({"guided_choice": ["perhaps", 'ne"in', "日本"]}, ["perhaps", 'ne"in', "日本"].__contains__),
        ({"guided_grammar": 'start: "<" /[a-z]{1,8}/ ">"'}, re.compile("<[a-z]{1,8}>").fullmatch),
        ({"structured_outputs": {"grammar": 'root ::= "(" [0-9] [0-9]? ")"'}}, re.compile(r"\([0-9]{1,2}\)").fullmatch),
    ):  # fmt: skip
        text, end = text_of(api_server, **{"max_tokens": 120, **fields})
        if follows is not None:
            assert end == "stop", (fields, text)
            assert follows(text), (fields, text)
        elif end == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert text.startswith("{")
        assert not re.search(r"\s{40}", text)


def test_what_goes_together_with_it(api_server: RunningServer) -> None:
    answer = post(
        api_server,
        "completions",
        prompt=["The city of Paris as JSON: ", "Rome: "],
        n=2,
        best_of=3,
        seed=11,
        temperature=1.2,
        frequency_penalty=0.4,
        logprobs=2,
        echo=True,
        max_tokens=100,
        guided_json=CITY,
        ignore_eos=True,
    ).json()
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"].partition(": ")[2]), CITY)
        assert len(choice["logprobs"]["tokens"]) > 10


def test_a_cut_is_a_cut(api_server: RunningServer) -> None:
    text, end = text_of(api_server, response_format=FORM, max_tokens=6)
    assert end == "length"
    assert text.startswith("{")
    stopped, end = text_of(api_server, response_format=FORM, max_tokens=100, stop=['"population"'])
    assert end == "stop"
    assert "name" in stopped
    assert "population" not in stopped


def test_min_tokens_holds_until_nothing_else_may_come(api_server: RunningServer) -> None:
    text, end = text_of(api_server, guided_regex="[ab]+", min_tokens=12, max_tokens=40)
    assert re.fullmatch("[ab]+", text)
    assert len(text) >= 12 or end == "length"
    assert text_of(api_server, guided_choice=["yes"], min_tokens=30, max_tokens=40) == ("yes", "stop")


def test_rules_that_leave_nothing_are_named(api_server: RunningServer) -> None:
    response = post(
        api_server, "completions", prompt="a", guided_choice=["yes"], allowed_token_ids=[1, 2, 3], max_tokens=4
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "nothing_allowed")
    assert "grammar" in error["message"]


def test_a40_what_is_refused_is_so_before_any_header_and_leaves_others_alone(
    api_server: RunningServer, client: openai.OpenAI
) -> None:
    good = text_of(api_server, guided_regex="^(.*)$", max_tokens=5)
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "not": {}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=wrong, stream=stream)
        assert refused.value.param == "response_format.json_schema.schema"
        assert '"not"' in refused.value.message
        assert post(api_server, "completions", prompt="a", guided_regex="[", stream=stream).status_code == 400
    # One that ends the process which compiles it.
    deep = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3_000)) + '\na3000: "x"'
    response = post(api_server, "completions", prompt="a", guided_grammar=deep)
    assert (response.status_code, "more work" in response.text) == (400, True)
    assert text_of(api_server, guided_regex="^(.*)$", max_tokens=5) == good
    assert api_server.total("splitserve_grammar_refusals_total", reason="too_much_work") == 1
    assert api_server.total("splitserve_grammar_checks_total", result="known") >= 2
