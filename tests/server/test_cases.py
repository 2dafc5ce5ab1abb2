"""Rows of the list of faults that other servers had (parts A, B, C, G) that are about the text of a real model, or a
real connection. See tests/cluster/test_cases.py for the others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.refusals.bodies import Kind
from benchmarks.refusals.exchange import exchange
from tests.server.conftest import API_KEY, CONTEXT
from tests.server.generate import stream_events
from tests.server.running_server import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(api_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=api_server.url, timeout=120, headers=headers) as client:
        yield client
    api_server.wait_for_baseline()


def whole(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The only choice of an answer."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    choice["text"] = text_of(choice)
    return dict(choice)


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[str], str]:
    """The pieces of the only choice, and why it ended."""
    choices = [event["choices"][0] for event in stream_events(client, path, body)]
    return [text_of(choice) for choice in choices], choices[-1]["finish_reason"]


def both(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason, the same whole and streamed."""
    choice = whole(client, path, body)
    pieces, reason = streamed(client, path, body)
    assert ("".join(pieces), reason) == (choice["text"], choice["finish_reason"])
    return choice["text"], choice["finish_reason"]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice.get("message", choice.get("delta")).get("content") or "")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# -- A ---------------------------------------------------------------------------------------------


def test_a05_prompts_around_the_context(client: httpx.Client) -> None:
    for _ in range(3):
        for length, status in ((CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400)):
            body = {"prompt": [9] * length, **GREEDY}
            for stream in (False, True):
                assert client.post(TEXT, json={**body, "stream": stream}).status_code == status
    choice = whole(client, TEXT, {"prompt": [9] * (CONTEXT - 1), "return_token_ids": True})
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 1)


def test_a16_an_empty_prompt_on_a_tokenizer_without_bos(client: httpx.Client) -> None:
    for prompt in ("", [], [[]], [""]):
        assert client.post(TEXT, json={"prompt": prompt}).status_code == 400


def test_a19_top_logprobs_with_top_p_are_finite(client: httpx.Client) -> None:
    body = {
        "messages": user("Hi"),
        "top_p": 0.3,
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 1,
        "max_tokens": 4,
    }
    response = client.post(CHAT, json=body)
    answer = json.loads(response.content, parse_constant=lambda name: pytest.fail(name))
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 5
        assert -9999 <= entry["logprob"] <= 0


def test_a20_penalties_and_the_other_rules(client: httpx.Client) -> None:
    prompt = {"prompt": "One two three one two three one two", "max_tokens": 12, **GREEDY}
    plain = whole(client, TEXT, prompt)["text"]
    for rule in (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"bad_words": ["three"]},
    ):
        assert whole(client, TEXT, prompt | rule)["text"] != plain, rule
    assert "three" not in whole(client, TEXT, prompt | {"bad_words": ["three"]})["text"]
    allowed = whole(client, TEXT, prompt | {"allowed_token_ids": [42, 43], "return_token_ids": True})["token_ids"]
    assert set(allowed) <= {42, 43}
    forced = whole(client, TEXT, prompt | {"logit_bias": {"42": 100}, "return_token_ids": True})["token_ids"]
    assert set(forced) == {42}


def test_a22_a_tiny_temperature_is_greedy(client: httpx.Client) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8}
    greedy = whole(client, TEXT, {**body, **GREEDY})["text"]
    assert greedy
    for temperature in (1e-4, 1e-9, 1e-45):
        assert whole(client, TEXT, {**body, "temperature": temperature})["text"] == greedy


def test_a34_a35_a37_histories(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hi"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    histories = [
        (200, [*user("Hi"), {"role": "assistant", "content": parts}, {"role": "user", "content": parts}]),
        (200, [*user("a"), *user("b")]),
        (200, [*user("a"), {"role": "system", "content": "be brief"}]),
        (400, [*user("a"), {"role": "alien", "content": "b"}]),
        (400, [*user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]),
        (400, [*user("a"), {"role": "tool", "tool_call_id": "c", "content": "x"}]),
    ]
    for status, messages in histories:
        response = client.post(CHAT, json={"messages": messages, "max_tokens": 2})
        assert response.status_code == status, response.text
        assert status == 200 or response.json()["error"]["param"].startswith("messages")


def test_a44_two_requests_with_the_same_id(client: httpx.Client) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 8, **GREEDY} for prompt in ("The sun is", "My name is")]
    alone = [whole(client, TEXT, body)["text"] for body in bodies]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda body: client.post(TEXT, json=body, headers={"X-Request-Id": "x"}), bodies))
    assert [response.json()["choices"][0]["text"] for response in together] == alone
    assert {response.headers["x-request-id"] for response in together} == {"x"}


# -- B ---------------------------------------------------------------------------------------------


def test_b01_characters_of_several_tokens(client: httpx.Client) -> None:
    messages = user("Repeat exactly: 🔥🌶️👨‍👩‍👧 ďábelské 你好")
    choice = whole(client, CHAT, {"messages": messages, "max_tokens": 40, **GREEDY})
    pieces, _ = streamed(client, CHAT, {"messages": messages, "max_tokens": 40, **GREEDY})
    assert "".join(pieces) == choice["text"]
    assert "\ufffd" not in "".join(pieces)[:-1]


def test_b02_a_prompt_that_ends_within_a_character_stays_out_of_the_answer(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "Hello 🌶"}).json()["tokens"][:-1]
    body = {"prompt": ids, "max_tokens": 6, "return_token_ids": True, **GREEDY}
    choice = whole(client, TEXT, body)
    pieces, _ = streamed(client, TEXT, body)
    assert "".join(pieces) == choice["text"]
    assert "Hello" not in choice["text"]


def test_b04_b05_b07_b08_stop_strings(client: httpx.Client) -> None:
    body = {"prompt": "Here is the English alphabet: ABC", "max_tokens": 16, **GREEDY}
    text, _ = both(client, TEXT, body)
    stops = {text[0], text[3:7], text[5], text[2:4]}
    for stop in stops:
        before = text[: text.index(stop)]
        assert both(client, TEXT, body | {"stop": stop}) == (before, "stop")
        included = body | {"stop": [stop], "include_stop_str_in_output": True}
        assert both(client, TEXT, included) == (before + stop, "stop")
    answer = client.post(TEXT, json=body | {"stop": text[0]}).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"] >= 1) == ("", True)


def test_b20_c11_echo_with_logprobs_twice_and_streamed(client: httpx.Client) -> None:
    body = {"prompt": "\n1. Carol has 20", "echo": True, "logprobs": 1, "max_tokens": 5, **GREEDY}
    first, second = whole(client, TEXT, body), whole(client, TEXT, body)
    assert first == second
    assert first["text"].startswith("\n1. Carol has 20")
    assert "".join(first["logprobs"]["tokens"]) == first["text"]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in first["logprobs"]["token_logprobs"][1:])
    tokens: list[str] = []
    for event in stream_events(client, TEXT, body):
        tokens += (event["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    assert tokens == first["logprobs"]["tokens"]
    scored = whole(client, TEXT, body | {"max_tokens": 0})
    assert scored["logprobs"]["token_logprobs"] == first["logprobs"]["token_logprobs"][:-5]


# -- C ---------------------------------------------------------------------------------------------


def test_c01_c02_seeded_choices(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "n": 4, "seed": 7, "temperature": 1, "max_tokens": 12}
    first, again = (client.post(TEXT, json=body).json()["choices"] for _ in range(2))
    assert first == again
    assert len({choice["text"] for choice in first}) == 4
    texts = [""] * 4
    for event in stream_events(client, TEXT, body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in first]


def test_best_of(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "seed": 7, "max_tokens": 6}
    chosen = whole(client, TEXT, body | {"best_of": 3})
    every = client.post(TEXT, json=body | {"n": 3, "logprobs": 0}).json()["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"]) for choice in every]
    assert chosen["text"] == every[means.index(max(means))]["text"]


def test_beam_search(client: httpx.Client) -> None:
    """That it is transformers' own is tested in the engine; here, that it comes through HTTP, whole and streamed."""
    body = {"prompt": "The capital of France is", "max_tokens": 6, "use_beam_search": True, "n": 2, "best_of": 4}
    answer = client.post(TEXT, json=body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 2
    streamed_texts = ["", ""]
    for event in stream_events(client, TEXT, body):
        for choice in event["choices"]:
            streamed_texts[choice["index"]] += choice["text"]
    assert streamed_texts == texts
    one = whole(client, TEXT, body | {"max_tokens": 1, "n": 1})
    assert texts[0].startswith(one["text"][:1])


# -- G ---------------------------------------------------------------------------------------------


def test_g05_huge_and_hostile_bodies_delay_nobody(client: httpx.Client, api_server: RunningServer) -> None:
    """Where this machine stands still meanwhile, everybody is delayed: then again."""
    # The row says 0.2 s on a machine of its own (benchmarks/refusals measures that); here others may be at work, and
    # are so before, too.
    tries = (gaps_beside_hostile_bodies(client, api_server) for _ in range(3))
    assert any(max(beside) < 0.3 + 3 * max(before) for before, beside in tries)


def gaps_beside_hostile_bodies(client: httpx.Client, api_server: RunningServer) -> tuple[list[float], list[float]]:
    """How long somebody else's answers took before, and meanwhile."""
    gaps: list[float] = []
    over = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=api_server.url) as poller:
            while not over.is_set():
                started_s = time.monotonic()
                assert poller.get("/health").status_code == 200
                gaps.append(time.monotonic() - started_s)
                over.wait(0.1)

    huge = json.dumps({"messages": user("x" * 27_000_000)}).encode()
    hostile = [
        (CHAT, json.dumps({"messages": user("word " * 300_000)}).encode()),
        (TEXT, b'{"prompt":[' + b"1," * 900_000 + b"1]}"),
        (TEXT, b'{"prompt":[' + b'"",' * 600_000 + b'""]}'),
        (CHAT, b'{"messages":[' + b"{}," * 600_000 + b"{}]}"),
        ("/tokenize", json.dumps({"prompt": "word " * 300_000}).encode()),
    ]
    poller = threading.Thread(target=poll)
    poller.start()
    try:
        time.sleep(2)
        num_before = len(gaps)
        for is_chunked in (False, True):
            kind = Kind("27 MB", CHAT, huge, is_chunked=is_chunked)
            assert exchange(api_server.url, kind, {"Authorization": f"Bearer {API_KEY}"})[0] == 413
        for path, body in hostile:
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400, response.text
        time.sleep(0.3)
    finally:
        over.set()
        poller.join()
    assert num_before > 3
    assert len(gaps) > num_before + 3
    print(f"slowest before {max(gaps[:num_before]):.3f} s, meanwhile {max(gaps[num_before:]):.3f} s")
    return gaps[:num_before], gaps[num_before:]


def test_headers_that_ray_serve_would_take_for_its_own(client: httpx.Client, api_server: RunningServer) -> None:
    body = {"prompt": "The sun is", "max_tokens": 4, **GREEDY}
    text = whole(client, TEXT, body)["text"]
    for name, value in [
        ("x-request-timeout-seconds", "0.001"),
        ("x-request-disconnect-disabled", "?1"),
        ("serve_multiplexed_model_id", "x"),
        ("x-session-id", "\xff"),
    ]:
        response = client.post(TEXT, json=body, headers=[(name.encode(), value.encode("latin-1"))])
        assert (response.status_code, response.json()["choices"][0]["text"]) == (200, text), name
    for value in (b"\xff", b"a b", "ä".encode()):
        response = client.post(TEXT, json=body, headers=[(b"x-request-id", value)])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")


def connection(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def http_request(body: bytes, path: str = TEXT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_answer(file: Any) -> tuple[int, dict[str, Any]]:
    status = int(file.readline().split()[1])
    length = 0
    while (line := file.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, json.loads(file.read(length))


def test_g07_pipelining_and_keep_alive_after_an_error(api_server: RunningServer) -> None:
    with connection(api_server) as link, link.makefile("rb") as file:
        good, bad = b'{"prompt":"a","max_tokens":1}', b'{"prompt":"a","max_tokens":-1}'
        link.sendall(http_request(bad) + http_request(good))
        assert [read_answer(file)[0] for _ in range(2)] == [400, 200]
        link.sendall(http_request(b"{"))
        assert read_answer(file)[0] == 400
        link.sendall(http_request(good))
        assert read_answer(file)[0] == 200


def test_g04_slow_bodies_are_given_up_while_others_are_served(client: httpx.Client, api_server: RunningServer) -> None:
    """All of them within their 3 s, not one after the other. Where the machine stands still they come again."""
    took_s = _until_slow_bodies_are_given_up(client, api_server)
    if took_s >= 30:
        took_s = _until_slow_bodies_are_given_up(client, api_server)
    assert took_s < 30


def _until_slow_bodies_are_given_up(client: httpx.Client, api_server: RunningServer) -> float:
    """In seconds. Somebody else is served meanwhile."""
    links = [connection(api_server) for _ in range(200)]
    try:
        for link in links:
            link.sendall(http_request(b"x" * 1000)[:-999])
        started_s = time.monotonic()
        assert client.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        for link in links:
            with link.makefile("rb") as file:
                assert int(file.readline().split()[1]) == 408
        return time.monotonic() - started_s
    finally:
        for link in links:
            link.close()


def test_g04_a_body_that_ends_before_its_length_harms_nobody(api_server: RunningServer, client: httpx.Client) -> None:
    for _ in range(5):
        with connection(api_server) as link:
            link.sendall(http_request(b'{"prompt":"a"}')[:-3])
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1000)[:13] in (b"", b"HTTP/1.1 400 ", b"HTTP/1.1 408 ")
    assert client.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_g11_control_tokens_in_a_message_are_text(client: httpx.Client) -> None:
    def count(text: str) -> int:
        return int(client.post("/tokenize", json={"messages": user(text)}).json()["count"])

    assert count("x<|im_end|>") > count("x") + 1


def test_g14_metrics_and_log_hold_no_prompt_and_no_key(client: httpx.Client, api_server: RunningServer) -> None:
    client.post(TEXT, json={"prompt": "xyzzy plugh secret", "max_tokens": 1})
    client.post(TEXT, json={"prompt": "xyzzy plugh secret", "stop": ["xyzzy"] * 9})
    metrics = httpx.get(f"{api_server.url}/metrics").text
    for text in ("xyzzy", API_KEY):
        assert text not in metrics
        assert text not in api_server.log()
