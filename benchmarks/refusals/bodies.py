"""Requests that must be refused, by kind. Small ones are what a client gets wrong, large ones what somebody sends who
means harm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_HELLO = [{"role": "user", "content": "hi"}]
_CALL = '{"function":{"name":"f","arguments":"{}"}}'


@dataclass(frozen=True, slots=True)
class Kind:
    """status: the answer that is expected. is_chunked: without Content-Length, so that its size shows late."""

    name: str
    path: str
    body: bytes
    status: int = 400
    is_chunked: bool = False
    content_type: str = "application/json"


def small_kinds() -> list[Kind]:
    """Up to some 100 KB."""
    fields: dict[str, dict[str, Any]] = {
        "wrong type": {"max_tokens": "5"},
        "n of a billion": {"n": 1_000_000_000},
        "unknown token in logit_bias": {"logit_bias": {"999999": -100}},
        "five stops": {"stop": ["a", "b", "c", "d", "e"]},
        "schema that is not followed": {"guided_json": {"type": "object", "not": {}}},
        "regex that is none": {"guided_regex": "["},
        "schema of 600 properties": {"guided_json": {"properties": {f"p{i}": {} for i in range(600)}}},
        "grammar of 3,000 levels": {"guided_grammar": _deep_grammar(3_000)},
        "schema of 13 patterns at once": {"guided_json": {"allOf": [{"pattern": f".*{i}a*"} for i in range(13)]}},
        "top_logprobs of a million": {"logprobs": True, "top_logprobs": 1_000_000},
    }
    kinds = [Kind(name, CHAT, _json(messages=_HELLO, **wrong)) for name, wrong in fields.items()]
    return [
        *kinds,
        Kind("no body", TEXT, b""),
        Kind("cut short", TEXT, b'{"prompt":"a","max_to'),
        Kind("lone surrogate", TEXT, rb'{"prompt":"\udcf0"}'),
        Kind("no UTF-8", TEXT, b'{"prompt":"\xff"}'),
        Kind("NaN", TEXT, b'{"prompt":"a","temperature":NaN}'),
        Kind("100,000 deep", TEXT, b'{"prompt":' + b"[" * 100_000),
        Kind("duplicate keys", TEXT, b'{"prompt":"a",' + b'"n":1,' * 10_000 + b'"n":0}'),
        Kind("unknown token", TEXT, _json(prompt=[5279552648203111001])),
        Kind("other model", TEXT, _json(prompt="a", model="other"), status=404),
        Kind("no JSON", TEXT, b"prompt=a", status=415, content_type="application/x-www-form-urlencoded"),
        Kind("a token too many", TEXT, _json(prompt=[9] * 2048)),
        Kind("role that is none", CHAT, _json(messages=[{"role": "alien", "content": "x"}])),
    ]


def large_kinds() -> list[Kind]:
    """Just under the 4 MiB that configs/local.yaml allows, but for the first two."""
    text = "word " * 830_000
    huge = _json(messages=[{"role": "user", "content": "x" * 27_000_000}])
    return [
        Kind("27 MB", CHAT, huge, status=413),
        Kind("27 MB, in chunks", CHAT, huge, status=413, is_chunked=True),
        Kind("4 MB of chat", CHAT, _json(messages=[{"role": "user", "content": text}])),
        Kind("4 MB of prompt", TEXT, _json(prompt=text)),
        Kind("4 MB of prompt, to be cut", TEXT, _json(prompt=text, truncate_prompt_tokens=8)),
        Kind("4 MB of one letter", TEXT, _json(prompt="x" * 4_000_000)),
        Kind("120 KB of rare characters", TEXT, _json(prompt="\u1234" * 40_000)),
        Kind("4 MB to tokenize", "/tokenize", _json(prompt=text)),
        Kind("2,000,000 ids", TEXT, b'{"prompt":[' + b"1," * 2_000_000 + b"1]}"),
        Kind("2,000,000 ids to detokenize", "/detokenize", b'{"tokens":[' + b"1," * 2_000_000 + b"1]}"),
        Kind("1,000,000 prompts", TEXT, b'{"prompt":[' + b'"",' * 1_000_000 + b'""]}'),
        Kind("90,000 tool calls", CHAT, _message(b'"tool_calls":[' + f"{_CALL},".encode() * 90_000 + b"1]")),
        Kind("100,000 parts", CHAT, _message(b'"content":[' + b'{"type":"text","text":"a"},' * 100_000 + b"1]")),
        Kind("1,000,000 messages", CHAT, b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}"),
        Kind("300,000 fields", TEXT, b"{" + b",".join(b'"f%d":1' % i for i in range(300_000)) + b"}"),
        Kind("template variables", CHAT, _json(messages=_HELLO, chat_template_kwargs={"a": [{}] * 1_000_000})),
    ]


def _deep_grammar(num_levels: int) -> str:
    """Whose compilation overflows the stack."""
    return "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(num_levels)) + f'\na{num_levels}: "x"'


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def _message(fields: bytes) -> bytes:
    return b'{"messages":[{"role":"assistant",' + fields + b"}]}"
