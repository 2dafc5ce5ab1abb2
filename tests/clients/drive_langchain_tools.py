"""Runs in the clients' environment: langchain's agents, tools and typed answers. Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

url, key = sys.argv[1:]


class Place(BaseModel):
    """So narrow that a small model comes to an end."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)


@tool(args_schema=Place)
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class Capital(BaseModel):
    """The capital of a country."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=99_999_999)


model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="SmolLM2-135M-Instruct", temperature=0, max_tokens=96)
question = [HumanMessage("What is the weather in Paris?")]
forced = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
asking = forced.invoke(question)
streamed = AIMessageChunk(content="")
for chunk in forced.stream(question):
    streamed += chunk
call = asking.tool_calls[0]
answer = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
# With a choice, the small model often calls again.
final = model.bind_tools([get_weather], tool_choice="none").invoke([*question, asking, answer])
agent = create_agent(model, [get_weather]).invoke({"messages": question})
typed = model.with_structured_output(Capital, method="function_calling").invoke("The capital of France?")
schema = model.with_structured_output(Capital, method="json_schema").invoke("The capital of France?")
print(
    json.dumps(
        {
            "call": [call["name"], call["args"]],
            "streamed": [[c["name"], c["args"]] for c in streamed.tool_calls],
            "finish_reason": asking.response_metadata["finish_reason"],
            "final": final.content,
            "agent": agent["messages"][-1].content,
            "typed": typed.model_dump(),
            "schema": schema.model_dump(),
        }
    )
)
