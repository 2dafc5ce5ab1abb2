"""Runs in the clients' environment: openai-agents over POST /v1/responses, whole and streamed. Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

url, key = sys.argv[1:]
QUESTION = "What is the capital of France?"

set_tracing_disabled(True)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = OpenAIResponsesModel(model="SmolLM2-135M-Instruct", openai_client=client)
    agent = Agent(
        name="guide", instructions="Be brief.", model=model, model_settings=ModelSettings(temperature=0, max_tokens=64)
    )
    first = await Runner.run(agent, QUESTION)
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And of Spain?"}])
    streamed = Runner.run_streamed(agent, QUESTION)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    print(
        json.dumps(
            {
                "answer": first.final_output,
                "usage": first.context_wrapper.usage.output_tokens,
                "second": second.final_output,
                "streamed": streamed.final_output,
                "deltas": "".join(deltas),
            }
        )
    )


asyncio.run(main())
