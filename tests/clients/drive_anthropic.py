"""Runs in the clients' environment: what Anthropic's client makes of a server that is none of its own. Arguments: URL,
API key.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import anthropic

url, key = sys.argv[1:]

client = anthropic.Anthropic(base_url=url, auth_token=key, max_retries=0)
messages = [{"role": "user", "content": "Hi"}]
errors = []
for call in (
    lambda: client.messages.create(model="any", max_tokens=8, messages=messages),
    lambda: client.messages.create(model="any", max_tokens=8, messages=messages, stream=True),
    lambda: client.messages.count_tokens(model="any", messages=messages),
):
    try:
        call()
    except anthropic.NotFoundError as error:
        errors.append([error.body["error"]["type"], str(error)])
print(json.dumps(errors))
