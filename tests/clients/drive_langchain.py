"""Runs in the clients' environment: langchain-openai, whole, streamed, with log-probabilities, and over POST
/v1/responses. Arguments: URL, API key.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

url, key = sys.argv[1:]
MODEL, QUESTION = "SmolLM2-135M-Instruct", "What is the capital of France?"

chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=MODEL, temperature=0, max_tokens=16)
answer = chat.invoke(QUESTION)
chunks = list(chat.stream(QUESTION, stream_usage=True))
scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
over_responses = chat.model_copy(update={"use_responses_api": True})
text = OpenAI(base_url=f"{url}/v1", api_key=key, model=MODEL, temperature=0, max_tokens=8).invoke("1, 2, 3,")
print(
    json.dumps(
        {
            "answer": answer.content,
            "usage": answer.usage_metadata["output_tokens"],
            "streamed": "".join(str(chunk.content) for chunk in chunks),
            "batch": [message.content for message in chat.batch([QUESTION, "Say hi."])],
            "num_scored": len(scored.response_metadata["logprobs"]["content"]),
            "completion": text,
            "responses": over_responses.invoke(QUESTION).text,
            "responses_streamed": "".join(chunk.text for chunk in over_responses.stream(QUESTION)),
        }
    )
)
