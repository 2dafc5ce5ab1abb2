"""Rows of the list of faults that other servers had (parts A, B, C, G), where they are about HTTP and not about text.

The table is sent both ways, streamed and not: what is wrong must get the same answer, before any header of a stream.
Rows about the text of a real model are in tests/server/test_cases.py, those about bytes of a body alone (A11, A31, A46)
also in test_openai_api.py, keys and request ids (A44, G01, G02) in test_http_auth.py.

Not here, as what they are about does not exist yet: C11's prefix cache, C13 (adapters), C14 (prefix cache), G13
(chart). C08 and C10 are in tests/engines/test_preemption.py and tests/server/test_small_pool.py, C07 in the engine's
tests of rules, G08 in tests/server/test_small_pool.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import re
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from cluster.text.prompt_echo import PromptEcho
from cluster.text.tokenizer import Tokenizer
from scheduler.beam_search import BeamParams
from tests.cluster.api_client import CHAT, HELLO, TEXT, ApiClient, api_client
from tests.cluster.fake_ingress import ByteTokenizer

BOTH = (CHAT, TEXT)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LONG = "x" * 600  # the fake tokenizer makes a token of each byte, and the context has 512

# id, paths, fields, status, param
ROWS: list[tuple[str, tuple[str, ...], dict[str, Any], int, str | None]] = [
    ("A01", BOTH, {"max_tokens": None}, 200, None),
    ("A02", BOTH, {"max_tokens": 0}, 400, "max_tokens"),
    ("A02", BOTH, {"max_tokens": -1}, 400, "max_tokens"),
    ("A04", (TEXT,), {"prompt": "x" * 513}, 400, "prompt"),
    ("A05", (TEXT,), {"prompt": "x" * 512}, 400, "prompt"),
    ("A05", (TEXT,), {"prompt": "x" * 511}, 200, None),
    ("A07", BOTH, {"max_completion_tokens": 3}, 200, None),
    ("A08", BOTH, {"model": None}, 200, None),
    ("A08", BOTH, {"model": "other"}, 404, "model"),
    ("A10", (CHAT,), {"messages": []}, 400, "messages"),
    ("A13", (TEXT,), {"prompt": [5279552648203111001]}, 400, "prompt"),
    ("A13", (TEXT,), {"prompt": [257]}, 400, "prompt"),
    ("A13", (TEXT,), {"prompt": [-1]}, 400, "prompt"),
    ("A14", BOTH, {"logit_bias": {"999999": -100}}, 400, "logit_bias"),
    ("A14", BOTH, {"logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ("A14", BOTH, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ("A14", BOTH, {"logit_bias": {"5": -100}}, 200, None),
    ("A16", (TEXT,), {"prompt": ""}, 400, "prompt"),
    ("A16", (TEXT,), {"prompt": []}, 400, "prompt"),
    ("A16", (TEXT,), {"prompt": [[]]}, 400, "prompt"),
    ("A16", (TEXT,), {"prompt": [""]}, 400, "prompt"),
    ("A17", (CHAT,), {"logprobs": True, "top_logprobs": 1000000}, 400, "top_logprobs"),
    ("A17", (CHAT,), {"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    ("A17", (CHAT,), {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("A19", (CHAT,), {"top_p": 0.3, "logprobs": True, "top_logprobs": 5, "temperature": 1}, 200, None),
    ("A20", BOTH, {"repetition_penalty": 1.1}, 200, None),
    ("A20", BOTH, {"repetition_penalty": 1e9}, 200, None),
    ("A20", BOTH, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    ("A20", BOTH, {"repetition_penalty": -1}, 400, "repetition_penalty"),
    ("A20", BOTH, {"presence_penalty": 2.1}, 400, "presence_penalty"),
    ("A22", BOTH, {"temperature": 1e-4}, 200, None),
    ("A22", BOTH, {"temperature": 1e-45}, 200, None),
    ("A23", BOTH, {"temperature": 2}, 200, None),
    ("A23", BOTH, {"temperature": 1e6}, 400, "temperature"),
    ("A23", BOTH, {"temperature": 2.1}, 400, "temperature"),
    ("A23", BOTH, {"temperature": -0.1}, 400, "temperature"),
    ("A23", BOTH, {"temperature": math.nan}, 400, None),
    ("A23", BOTH, {"temperature": math.inf}, 400, None),
    ("A25", BOTH, {"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    *(("A25", BOTH, {"stop": stop}, 400, "stop") for stop in ("", [""], [None], [1])),
    *(("A26", BOTH, {"n": n}, 400, "n") for n in (1000000000, 0, -1, 1.5, True)),
    *(("A28", BOTH, {"max_tokens": value}, 400, "max_tokens") for value in (True, "5", 5.5)),
    ("A28", BOTH, {"max_tokens": 5.0}, 200, None),
    ("A28", BOTH, {"stream": "yes"}, 400, "stream"),
    ("A28", BOTH, {"temperature": "0"}, 400, "temperature"),
    ("A29", BOTH, {"foo": 1}, 200, None),
    ("A29", (CHAT,), {"messages": [{"role": "user", "content": "hi", "name": "bob", "id": 7}]}, 200, None),
    ("A31", (CHAT,), {"messages": [{"role": "user", "content": "emoji \ud83d"}]}, 400, None),
    ("A31", (TEXT,), {"prompt": "\udcf0"}, 400, None),
    ("A31", (TEXT,), {"prompt": "\U0001f600"}, 200, None),
    ("A32", (TEXT,), {"prompt": "a\0b\u202e"}, 200, None),
    ("A32", (CHAT,), {"messages": [{"role": "user", "content": "a\0b\u202e"}]}, 200, None),
    ("A34", (CHAT,), {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}, 200, None),
    ("A35", (CHAT,), {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, *HELLO]}, 200, None),
    ("A37", (CHAT,), {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages[0].role"),
    ("A38", (CHAT,), {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 400, "prompt"),
    ("A40", BOTH, {"guided_regex": "^(.*)$"}, 200, None),
    ("A40", BOTH, {"guided_regex": "["}, 400, "guided_regex"),
    ("A40", BOTH, {"guided_regex": "^(.*)$"}, 200, None),
    (
        "A41",
        BOTH,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        400,
        "response_format.json_schema.name",
    ),
    ("A41", BOTH, {"guided_json": {"type": "string", "pattern": "(?=a)"}}, 400, "guided_json"),
    ("A41", BOTH, {"guided_json": {"properties": {"a": {"not": {}}}}}, 400, "guided_json"),
    ("A43", BOTH, {"ec_transfer_params": {"x": [{}]}}, 400, "ec_transfer_params"),
    ("B17", BOTH, {"stream_options": {"include_usage": True}, "stream": False}, 400, "stream_options"),
    *(("C05", BOTH, {"seed": seed}, 200, None) for seed in (0, -1, 2**63 - 1, None)),
    *(("C05", BOTH, {"seed": seed}, 400, "seed") for seed in (2**63, "7")),
    ("G10", (CHAT,), {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]}, 400, "messages[0].content"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b13_rows_of_the_table(stream: bool) -> None:
    """All in one app: what one request does must not harm the next."""
    async with api_client() as c:
        for row in ROWS:
            id_, paths, fields, status, param = row
            for path in paths:
                if "stream" in fields and stream:
                    continue
                began_s = time.process_time()  # of work, not of a machine that stands still
                response = await c.send(path, fields, stream)
                took_s = time.process_time() - began_s
                assert response.status_code == status, (row, response.text)
                if status == 200:
                    continue
                assert response.headers["content-type"] == "application/json"
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["param"] == param, row
                assert took_s < 1, id_
        assert (await c.send(TEXT, {})).status_code == 200


MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"7",
    b"{}",
    b'{"prompt":"\xff"}',
    b'{"prompt":"a"}x',
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("path", BOTH)
async def test_a11_malformed_bodies(path: str) -> None:
    async with api_client() as c:
        for raw in MALFORMED:
            response = await c.send(path, raw)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), raw


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain",
                                          "application/json; charset=utf-16"])  # fmt: skip
async def test_a46_other_content_types(content_type: str) -> None:
    async with api_client() as c:
        response = await c.http.post(TEXT, content=b'{"prompt":"a"}', headers={"content-type": content_type})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_compressed_bodies_are_named() -> None:
    raw = b'{"prompt":"a"}'
    headers = {"content-type": "application/json"}
    async with api_client() as c:
        for encoding in ("gzip", "br", "deflate, gzip"):
            response = await c.http.post(
                TEXT, content=gzip.compress(raw), headers=headers | {"content-encoding": encoding}
            )
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "Content-Encoding")
            assert "without Content-Encoding" in error["message"]
        response = await c.http.post(TEXT, content=raw, headers=headers | {"content-encoding": "Identity"})
        assert response.status_code == 200


async def test_a04_the_message_names_the_length_and_the_limit() -> None:
    async with api_client() as c:
        message = (await c.send(TEXT, {"prompt": "x" * 500, "max_tokens": 100})).json()["error"]["message"]
        assert all(number in message for number in ("500", "100", "512", "12"))


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 4}, {"logprobs": 4, "echo": True}])
async def test_a_report_of_too_many_prompt_logprobs_is_refused(fields: dict[str, Any]) -> None:
    async with api_client(max_reported_logprobs=399) as c:
        response = await c.send(TEXT, {"prompt": "x" * 10, "n": 8, "max_tokens": 1, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "too_many_logprobs", next(iter(fields)))
        assert all(number in error["message"] for number in ("8", "5", "400", "399"))


async def test_a07_max_completion_tokens_counts() -> None:
    async with api_client() as c:
        for path in BOTH:
            answer = (await c.send(path, {"max_completion_tokens": 3, "max_tokens": 9})).json()
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")


async def test_a26_huge_n_is_refused_at_once() -> None:
    async with api_client() as c:
        await c.send(TEXT, {"n": 0})
        took_s = []
        for _ in range(3):
            started_s = time.process_time()
            assert (await c.send(TEXT, {"n": 1_000_000_000})).status_code == 400
            took_s.append(time.process_time() - started_s)
        assert min(took_s) < 0.05


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOTH)
async def test_b10_b11_every_stream_has_one_finish_and_a_done(path: str) -> None:
    async with api_client() as c:
        asks = [
            {"max_tokens": 1 + i % 30, "n": 1 + i % 3, "seed": i, "stop": "a" if i % 2 else "zz"} for i in range(250)
        ]
        streams = await asyncio.gather(*(c.events(path, ask) for ask in asks))
    for ask, events in zip(asks, streams, strict=True):
        if path == CHAT:
            first = [event["choices"][0] for event in events if "role" in event["choices"][0]["delta"]]
            assert sorted(choice["index"] for choice in first) == list(range(ask["n"]))
        finishes = [choice for event in events for choice in event["choices"] if choice["finish_reason"] is not None]
        assert sorted(choice["index"] for choice in finishes) == list(range(ask["n"]))
        assert {choice["finish_reason"] for choice in finishes} <= {"stop", "length"}


@pytest.mark.parametrize("path", BOTH)
async def test_b16_b17_usage_in_streams(path: str) -> None:
    async with api_client() as c:
        *chunks, last = await c.events(path, {"max_tokens": 5, "stream_options": {"include_usage": True}})
        assert {chunk["usage"] for chunk in chunks} == {None}
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
        for options in ({}, None):
            assert all("usage" not in event for event in await c.events(path, {"stream_options": options}))
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = await c.events(path, {"max_tokens": 5, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0] >= 1, counts[-1], last["usage"]["completion_tokens"]) == (True, 5, 5)


async def test_b22_a_body_is_an_object_and_not_a_string_of_one() -> None:
    async with api_client() as c:
        for path in BOTH:
            response = await c.send(path, {})
            assert isinstance(response.json(), dict)
            assert response.headers["content-type"] == "application/json"


# -- logprobs and echo -----------------------------------------------------------------------------


def strict(response: httpx.Response) -> Any:
    """JSON without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(response.content, parse_constant=refuse)


async def streamed_completion(c: ApiClient, fields: dict[str, Any]) -> tuple[str, dict[str, list[Any]]]:
    """Text and logprobs of the only choice, put together from a stream."""
    text, logprobs = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in await c.events(TEXT, fields):
        (choice,) = event["choices"]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            logprobs[name] += values
    return text, logprobs


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", "é🔥 x", [104, 105, 0xF0, 0x9F]])
@pytest.mark.parametrize("max_tokens", [0, 1, 7])
async def test_b19_b20_echo_with_logprobs(prompt: Any, max_tokens: int) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "seed": 1}
    async with api_client() as c:
        answer = strict(await c.send(TEXT, fields))
        (choice,) = answer["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
        assert "".join(logprobs["tokens"]) == text
        ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        assert [len(values) for values in logprobs.values()] == [len(ids) + max_tokens] * 4
        assert text.startswith(bytes(ids).decode(errors="replace"))
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert text[offset:].startswith(token)
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        for logprob, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert logprob in top.values()
            assert 2 <= len(top) <= 3
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
        assert await streamed_completion(c, fields) == (text, logprobs)


async def test_echo_without_logprobs_and_of_several_prompts() -> None:
    async with api_client() as c:
        answer = (await c.send(TEXT, {"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 3})).json()
        assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "one", "two", "two"]
        assert {len(choice["text"]) for choice in answer["choices"]} == {6}
        assert {choice["logprobs"] for choice in answer["choices"]} == {None}
        only = (await c.send(TEXT, {"prompt": "one", "echo": True, "max_tokens": 0, "return_token_ids": True})).json()
        assert (only["choices"][0]["text"], only["choices"][0]["token_ids"]) == ("one", [])


async def test_chat_logprobs_whole_and_streamed_are_the_same() -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "seed": 3, "stop": "zzz"}
    async with api_client() as c:
        whole = strict(await c.send(CHAT, fields))["choices"][0]["logprobs"]["content"]
        streamed = []
        for event in await c.events(CHAT, fields):
            streamed += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert whole == streamed
    assert len(whole) == 6
    for entry in whole:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3


async def test_tokens_as_ids_and_prompt_logprobs() -> None:
    async with api_client() as c:
        fields = {
            "prompt": "ab",
            "max_tokens": 2,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "prompt_logprobs": 1,
        }
        (choice,) = strict(await c.send(TEXT, fields))["choices"]
        assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second["98"]["rank"] == 1
        answer = strict(await c.send(CHAT, {"prompt_logprobs": 0, "max_tokens": 2}))
        assert len(answer["prompt_logprobs"]) == 2
        assert answer["prompt_logprobs"][1].keys() == {str(ord("i"))}
        assert answer["choices"][0]["logprobs"] is None


async def test_best_of_returns_the_likeliest_and_counts_all() -> None:
    async with api_client() as c:
        fields = {"max_tokens": 6, "best_of": 4, "n": 2, "seed": 5}
        answer = (await c.send(TEXT, fields)).json()
        everything = (await c.send(TEXT, {"max_tokens": 6, "n": 4, "seed": 5, "logprobs": 0})).json()["choices"]
        means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in everything]
        best = sorted(range(4), key=lambda i: -means[i])[:2]
        assert [choice["text"] for choice in answer["choices"]] == [everything[i]["text"] for i in best]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["choices"][0]["logprobs"] is None


async def test_min_tokens_holds_for_stop_strings_too() -> None:
    async with api_client() as c:
        text = (await c.send(TEXT, {"max_tokens": 12, "seed": 9})).json()["choices"][0]["text"]
        stop = text[2]
        cut = (await c.send(TEXT, {"max_tokens": 12, "seed": 9, "stop": stop, "min_tokens": 5})).json()["choices"][0]
        assert cut["text"] == text[: text.find(stop, 5)] if stop in text[5:] else text


async def test_beam_search_is_asked_for_in_the_engines_words() -> None:
    async with api_client() as c:
        fields = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": "never"}
        for path in BOTH:
            for stream in (False, True):
                assert (await c.send(path, fields, stream)).status_code == 200
        assert len(c.ingress.source.specs) == 4
        for spec in c.ingress.source.specs:
            assert (spec.num_answers, spec.beam) == (2, BeamParams(4, 0.5, "never"))
        await c.send(TEXT, {"use_beam_search": True, "n": 3})
        assert c.ingress.source.specs[-1].beam == BeamParams(3)
        assert (await c.send(TEXT, {"use_beam_search": True, "best_of": 9})).status_code == 400


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOTH)
async def test_c01_c02_choices_differ_repeat_and_keep_to_themselves(path: str) -> None:
    def texts(body: Any) -> list[str]:
        return [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]

    async with api_client() as c:
        fields = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 16}
        first, second, *others = await asyncio.gather(
            *(c.send(path, fields) for _ in range(2)), *(c.send(path, fields | {"seed": i}) for i in range(10))
        )
        assert len(set(texts(first.json()))) == 4
        assert texts(first.json()) == texts(second.json())
        assert all(len(texts(other.json())) == 4 for other in others)
        own = [{"prompt": f"prompt {i}", "messages": [{"role": "user", "content": f"prompt {i}"}]} for i in range(10)]
        asked = [fields | prompt | {"n": 3} for prompt in own]
        together = await asyncio.gather(*(c.send(path, ask) for ask in asked))
        assert [texts(one.json()) for one in together] == [texts((await c.send(path, ask)).json()) for ask in asked]
        assert len({text for one in together for text in texts(one.json())}) == 30
        seen: dict[int, str] = {}
        for event in await c.events(path, fields):
            (choice,) = event["choices"]
            part = choice["text"] if path == TEXT else choice["delta"].get("content", "")
            seen[choice["index"]] = seen.get(choice["index"], "") + part
        assert [seen[i] for i in range(4)] == texts(first.json())


# -- bodies that are too large or too slow ---------------------------------------------------------


async def test_g04_large_and_lying_bodies() -> None:
    async with api_client(max_body_bytes=2_000) as c:
        for headers in ({"content-length": str(10**8)}, {"content-length": "9" * 400}):
            response = await c.http.post(TEXT, content=b"{}", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert (await c.http.post("/tokenize", content=b" " * 2_001)).status_code == 413


@pytest.mark.usefixtures("skipped_waits")
async def test_g04_a_body_that_never_ends_is_given_up() -> None:
    async def slow() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with api_client(body_timeout_s=0.2) as c:
        started_s = time.monotonic()
        slowly = [c.http.post(path, content=slow()) for path in (CHAT, TEXT, "/tokenize", "/detokenize")]
        waiting = [asyncio.ensure_future(post) for post in slowly]
        assert (await c.send(TEXT, {})).status_code == 200
        for response in await asyncio.gather(*waiting):
            assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
        assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("seed", range(3))
async def test_fuzzed_bodies(seed: int) -> None:
    """Cut, changed, nested, repeated: 4xx or, where it is still valid, 200."""
    import random

    rng = random.Random(seed)
    whole = json.dumps({"prompt": "hi", "max_tokens": 3, "stop": ["a"], "logit_bias": {"5": 1}, "n": 2}).encode()
    async with api_client() as c:
        for _ in range(150):
            raw = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                match rng.randrange(5):
                    case 0:
                        del raw[rng.randrange(len(raw) + 1) :]
                    case 1 if raw:
                        raw[rng.randrange(len(raw))] = rng.randrange(256)
                    case 2:
                        raw += rng.choice([b"}", b"[" * 2000, b'"\\ud800"', b"\x00", b',"n":1}'])
                    case 3:
                        raw = bytearray(b'{"prompt":' + b"[" * rng.randrange(3000))
                    case _:
                        raw = raw.replace(b"2", rng.choice([b"1e999", b"NaN", b"-0", b"true", b"null", b'"2"']))
            response = await c.send(TEXT, bytes(raw))
            assert response.status_code in (200, 400), raw
            if response.status_code != 200:
                assert set(response.json()) == {"error"}


async def test_g14_nothing_of_a_prompt_or_key_in_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-the-key-is-secret\n")
    secret = "my secret prompt"
    sections = {"auth": {"api_keys_file": str(file)}}
    with caplog.at_level("DEBUG"):
        async with api_client(sections, {"Authorization": "Bearer sk-the-key-is-secret"}) as c:
            await c.send(TEXT, {"prompt": secret, "foo": 1})
            await c.send(TEXT, {"prompt": secret, "stop": [secret] * 9})
            await c.send(CHAT, {"messages": [{"role": secret, "content": secret}]})
            await c.http.get("/v1/models", headers={"Authorization": "Bearer my secret prompt"})
            metrics = str(c.ingress.metrics.snapshot())
    logged = " ".join(str(vars(record)) for record in caplog.records if record.name.startswith("cluster"))
    assert "ignored_fields" in logged
    for text in (secret, "sk-the-key"):
        assert text not in logged + metrics


# -- tokens ----------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize() -> None:
    async with api_client() as c:
        answer = (await c.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert answer == {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169], "token_strs": ["h", "�", "�"]}
        chat = (await c.http.post("/tokenize", json={"messages": HELLO})).json()
        assert (chat["tokens"], chat["token_strs"]) == ([104, 105], None)
        back = await c.http.post("/detokenize", json={"tokens": [104, 195, 169, 256]})
        assert back.json() == {"prompt": "hé<eos>"}
        for path, body, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages"),
            ("/tokenize", {"prompt": 1}, "prompt"),
            ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
            ("/detokenize", {"tokens": [257]}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ]:
            response = await c.http.post(path, json=body)
            assert response.status_code == (404 if param == "model" else 400)
            assert response.json()["error"]["param"] == param


async def test_truncate_prompt_tokens() -> None:
    async with api_client() as c:
        for fields, kept in [
            ({"prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": 5}, 507),
            ({"prompt": LONG, "truncate_prompt_tokens": 8}, 8),
            ({"prompt": "ab", "truncate_prompt_tokens": 8}, 2),
            ({"prompt": "abcdef", "truncate_prompt_tokens": 3, "echo": True}, 3),
        ]:
            answer = (await c.send(TEXT, fields)).json()
            assert answer["usage"]["prompt_tokens"] == kept
        assert answer["choices"][0]["text"].startswith("def")
        error = (await c.send(TEXT, {"truncate_prompt_tokens": 512})).json()["error"]
        assert (error["param"], "511" in error["message"]) == ("truncate_prompt_tokens", True)


async def test_texts_that_need_not_fit_are_bounded_too() -> None:
    """They would be tokenized whole, however long."""
    async with api_client(max_text_chars=600) as c:
        long, longer = "x" * 600, "x" * 601
        messages = [{"role": "user", "content": longer}]
        cut = {"truncate_prompt_tokens": 4}
        assert (await c.send(TEXT, {"prompt": long, **cut})).status_code == 200
        assert (await c.http.post("/tokenize", json={"prompt": long})).json()["count"] == 600
        assert (await c.http.post("/detokenize", json={"tokens": [97] * 600})).json() == {"prompt": "a" * 600}
        for path, body, param in [
            (TEXT, {"prompt": longer, **cut}, "prompt"),
            (TEXT, {"prompt": ["a", longer], **cut}, "prompt"),
            (TEXT, {"prompt": [97] * 601, **cut}, "prompt"),
            (TEXT, {"prompt": [[97], [97] * 601], **cut}, "prompt"),
            (CHAT, {"messages": messages, **cut}, "messages"),
            ("/tokenize", {"prompt": longer}, "prompt"),
            ("/tokenize", {"messages": messages}, "messages"),
            ("/detokenize", {"tokens": [97] * 601}, "tokens"),
        ]:
            response = await c.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), body
            assert "600" in response.json()["error"]["message"]


async def test_an_echo_shows_a_control_token_that_truncation_made_the_first() -> None:
    def pieces(prompt: str | list[int], ids: list[int], keep: int | None) -> str:
        return PromptEcho(cast("Tokenizer", tokenizer), prompt, ids, keep).text

    class Starts(ByteTokenizer):
        """Puts <eos> in front of every text, and knows it by its name."""

        def encode_prompt(self, prompt: Any, *rest: Any, **more: Any) -> list[int]:
            parts = [[256] if part == "<eos>" else list(part.encode()) for part in re.split("(<eos>)", prompt)]
            return [256, *(token_id for part in parts for token_id in part)]

    tokenizer = Starts()
    ids = tokenizer.encode_prompt("ab<eos>cd")
    assert pieces("ab<eos>cd", ids, None) == "ab<eos>cd"
    assert pieces("ab<eos>cd", ids, 6) == "ab<eos>cd"  # as many as there are: nothing was cut
    assert pieces("ab<eos>cd", ids, 99) == "ab<eos>cd"
    assert pieces("ab<eos>cd", ids[-3:], 3) == "<eos>cd"
    assert pieces("ab<eos>cd", ids[-2:], 2) == "cd"
    assert pieces(ids, ids, None) == "<eos>ab<eos>cd"


async def test_what_could_never_choose_a_token_is_refused() -> None:
    async with api_client() as c:
        for fields in ({"allowed_token_ids": [97], "bad_words": ["a"]}, {"allowed_token_ids": [256], "min_tokens": 2}):
            response = await c.send(TEXT, fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")
        assert (await c.send(TEXT, {"allowed_token_ids": [97], "min_tokens": 2})).status_code == 200
        assert (await c.send(TEXT, {"allowed_token_ids": [999]})).status_code == 400
