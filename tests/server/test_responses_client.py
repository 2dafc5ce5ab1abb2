"""OpenAI's own client and a real server: POST /v1/responses through Serve's proxy, and in words with the chat path."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import API_KEY
from tests.server.running_server import RunningServer

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"

pytestmark = pytest.mark.slow


def test_it_says_what_chat_says(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY) as client:
        fields: dict[str, Any] = {"model": MODEL, "temperature": 0}
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        chat = client.chat.completions.create(messages=messages, max_tokens=16, **fields)
        asked = {"instructions": "Be brief.", "input": QUESTION, "max_output_tokens": 16, **fields}
        whole = client.responses.create(**asked)
        assert whole.output_text == chat.choices[0].message.content
        assert whole.usage.input_tokens == chat.usage.prompt_tokens
        assert whole.usage.output_tokens == chat.usage.completion_tokens
        assert (whole.status == "incomplete") == (chat.choices[0].finish_reason == "length")

        events = list(client.responses.create(stream=True, **asked))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == f"response.{whole.status}"
        assert events[-1].response.usage == whole.usage


def test_a_conversation_goes_on_with_what_came(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY) as client:
        fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
        first = client.responses.create(input=QUESTION, **fields)
        history = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And of Spain?"}]
        second = client.responses.create(input=history, **fields)
        assert second.usage.input_tokens > first.usage.total_tokens
        assert second.output_text


def test_what_is_not_stored_is_not_found(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        response = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2)
        with pytest.raises(openai.NotFoundError, match="not stored"):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input=QUESTION, previous_response_id=response.id)
        assert refused.value.param == "previous_response_id"
