"""Runs in the clients' environment: openai-agents over POST /v1/responses: texts, streamed texts, a tool, an object.
Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

url, key = sys.argv[1:]
QUESTION = "What is the capital of France?"

set_tracing_disabled(True)
asked: list[str] = []


class Verdict(BaseModel):
    is_right: bool


@function_tool
def get_weather(in_paris: bool) -> str:
    """The weather in Paris, or elsewhere."""
    asked.append(str(in_paris))
    return "sunny"


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
    caller = agent.clone(
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(temperature=0, max_tokens=64, tool_choice="required", parallel_tool_calls=False),
    )
    called = await Runner.run(caller, "What is the weather in Paris?")
    calls_streamed = Runner.run_streamed(caller, "What is the weather in Paris?")
    kinds = [event.data.type async for event in calls_streamed.stream_events() if event.type == "raw_response_event"]
    judged = await Runner.run(agent.clone(output_type=Verdict), "Is Paris the capital of France?")
    print(
        json.dumps(
            {
                "answer": first.final_output,
                "usage": first.context_wrapper.usage.output_tokens,
                "second": second.final_output,
                "streamed": streamed.final_output,
                "deltas": "".join(deltas),
                "called": [called.final_output, calls_streamed.final_output],
                "asked": asked,
                "kinds": kinds,
                "judged": type(judged.final_output.is_right).__name__,
            }
        )
    )


asyncio.run(main())
