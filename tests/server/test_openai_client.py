"""OpenAI's own client as it is: sync, async, streaming, with keys, log-probabilities and errors."""

from __future__ import annotations

import openai
import pytest

from tests.server.conftest import API_KEY
from tests.server.running_server import RunningServer

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = pytest.mark.slow


def test_sync(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2
        )
        (choice,) = answer.choices
        assert "Paris" in choice.message.content
        assert bytes(byte for entry in choice.logprobs.content[:-1] for byte in entry.bytes).decode() in (
            choice.message.content
        )
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        text = client.completions.create(model=MODEL, prompt="1, 2, 3,", temperature=0, max_tokens=4, logprobs=1)
        assert "".join(text.choices[0].logprobs.tokens) == text.choices[0].text
        assert text.usage.completion_tokens == 4


def test_errors_are_of_the_clients_own_classes(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
        assert refused.value.param == "temperature"
        assert refused.value.request_id
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=MESSAGES)
    with (
        openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="sk-wrong-0123", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


async def test_async_and_streaming(api_server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens > 0
        texts = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=2, stream=True)
        seen = {choice.index async for chunk in texts for choice in chunk.choices}
        assert seen == {0, 1, 2, 3}
