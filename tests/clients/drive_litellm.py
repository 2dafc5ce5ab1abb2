"""Runs in the clients' environment: litellm, whole, streamed, text completion, error. Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # there is no network

import litellm

url, key = sys.argv[1:]
MODEL = "SmolLM2-135M-Instruct"
options = {"api_base": f"{url}/v1", "api_key": key, "temperature": 0, "max_tokens": 16}
messages = [{"role": "user", "content": "What is the capital of France?"}]

answer = litellm.completion(model=f"openai/{MODEL}", messages=messages, **options)
chunks = list(litellm.completion(model=f"openai/{MODEL}", messages=messages, stream=True, **options))
text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="1, 2, 3,", **options)
try:
    litellm.completion(model=f"openai/{MODEL}", messages=[], **options)
    error = "none"
except litellm.BadRequestError as refused:
    error = str(refused)
print(
    json.dumps(
        {
            "answer": answer.choices[0].message.content,
            "usage": answer.usage.completion_tokens,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "completion": text.choices[0].text,
            "error": error,
        }
    )
)
