"""Runs in the clients' environment: pydantic-ai, whose typed answers are calls of a tool. Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, key = sys.argv[1:]


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=99_999_999)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    model = OpenAIChatModel("SmolLM2-135M-Instruct", provider=OpenAIProvider(openai_client=client))
    settings = {"temperature": 0.0, "max_tokens": 96, "parallel_tool_calls": False}
    agent = Agent(model, output_type=Capital, model_settings=settings)
    result = await agent.run("What is the capital of France?")
    async with agent.run_stream("What is the capital of France?") as stream:
        streamed = await stream.get_output()
    native = Agent(model, output_type=NativeOutput(Capital), model_settings={"temperature": 0.0, "max_tokens": 96})
    by_schema = await native.run("What is the capital of France?")
    text = await Agent(model, model_settings={"temperature": 0.0, "max_tokens": 16}).run(
        "What is the capital of France?"
    )
    outputs = {"typed": result.output, "streamed": streamed, "schema": by_schema.output}
    print(json.dumps({name: output.model_dump() for name, output in outputs.items()} | {"text": text.output}))


asyncio.run(main())
