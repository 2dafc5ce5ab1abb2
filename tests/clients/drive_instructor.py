"""Runs in the clients' environment: instructor, whose answers are pydantic models. Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

url, key = sys.argv[1:]
MODEL, MESSAGES = "SmolLM2-135M-Instruct", [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    """The capital of a country."""

    name: str = Field(max_length=20)
    kind: Literal["city", "town"]
    inhabitants: int = Field(ge=0, le=99_999_999)
    nickname: str | None = Field(max_length=12)


plain = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120, "max_retries": 0}
outputs = {}
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(plain, mode=mode)
    try:
        outputs[mode.name] = client.chat.completions.create(response_model=Capital, **asked).model_dump(mode="json")
    except Exception as error:  # a small model's JSON need not be of the schema that it was only told of
        outputs[mode.name] = type(error).__name__
streamed = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
    response_model=Capital, **asked
)
*_, last = streamed
print(json.dumps({**outputs, "streamed": last.model_dump(mode="json")}))
