"""Tenants of a whole server: what one sends, no other finds, by whatever the server goes to tell them apart.

What a stranger could time is counted instead, by the engines: prompt tokens computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.conftest import API_KEY, OTHER_KEYS, OneServer
from tests.server.running_server import RunningServer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BLOCK_SIZE = 16
LENGTH = 10 * BLOCK_SIZE + 5
FOUND = 10 * BLOCK_SIZE

pytestmark = pytest.mark.slow


class Cost(NamedTuple):
    """Of one request: what its usage says was found, and prompt tokens computed by all engines."""

    found: int
    computed: int

    @property
    def as_one(self) -> Cost:
        """HIT, if all was found: where decode finds it, prefill may compute it all the same, as costs go."""
        return HIT if self == (FOUND, LENGTH) else self


MISS, HIT = Cost(0, LENGTH), Cost(FOUND, LENGTH - FOUND)
Headers = dict[str, str]


class Asker:
    """One request at a time: what the engines count is all its own. seed: of its texts; askers of one server have
    different ones."""

    def __init__(self, server: RunningServer, seed: int = 0) -> None:
        self._server, self._rng = server, random.Random(seed)

    def text(self, length: int = LENGTH) -> list[int]:
        """A prompt that nobody has sent."""
        return [self._rng.randrange(1000, 40_000) for _ in range(length)]

    def ask(self, headers: Headers, prompt: list[int], **fields: Any) -> Cost:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True} | fields
        usage, computed = self.computed_by(headers, TEXT, body)
        assert usage["prompt_tokens"] == len(prompt)
        return Cost(usage["prompt_tokens_details"]["cached_tokens"], computed).as_one

    def computed_by(self, headers: Headers, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        before = self._server.total("splitserve_prefilled_tokens_total")
        answer = httpx.post(f"{self._server.url}{path}", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        self._server.wait_for_baseline()
        usage: dict[str, Any] = answer.json()["usage"]
        return usage, round(self._server.total("splitserve_prefilled_tokens_total") - before)


def by_key(key: str) -> Headers:
    return {"Authorization": f"Bearer {key}"}


def by_name(name: str) -> Headers:
    return {"X-Client-Id": name}


def check_apart(asker: Asker, one: Headers, two: Headers) -> None:
    """In both directions, and each finds its own."""
    for mine, theirs in ((one, two), (two, one)):
        prompt = asker.text()
        costs = [asker.ask(headers, prompt) for headers in (mine, mine, theirs, theirs, mine)]
        assert costs == [MISS, HIT, MISS, HIT, HIT]


def check_guesses(asker: Asker, victim: Headers, spy: Headers, control: Headers) -> None:
    """A right guess at a block's end, before and behind it, costs what a wrong one does."""
    secret = asker.text()
    asker.ask(victim, secret)
    for length in (1, 15, 16, 17, 31, 32, 33, FOUND - 1, FOUND, FOUND + 1, LENGTH):
        tail = asker.text(20)
        right = asker.ask(spy, secret[:length] + tail, cache_salt=f"guess {length}")
        wrong = asker.ask(control, asker.text(length) + tail, cache_salt=f"guess {length}")
        assert right == wrong == Cost(0, length + 20)
    assert asker.ask(spy, secret) == MISS
    assert asker.ask(victim, secret) == HIT, "it has been there to be found"


def check_salts(asker: Asker, mine: Headers, theirs: Headers) -> None:
    prompt = asker.text()
    salted = [asker.ask(mine, prompt, cache_salt=salt) for salt in ("x", "x", "y", "y", "x")]
    assert salted == [MISS, HIT, MISS, HIT, HIT]
    assert asker.ask(mine, prompt) == MISS
    assert asker.ask(theirs, prompt, cache_salt="x") == MISS
    assert asker.ask(mine, prompt) == HIT


@pytest.mark.timeout(600)
def test_keys_are_tenants(api_server: RunningServer) -> None:
    asker = Asker(api_server, 1)
    a, b, c = by_key(API_KEY), *map(by_key, OTHER_KEYS)
    check_apart(asker, a, b)
    check_guesses(asker, a, b, c)
    check_salts(asker, a, b)
    prompt = asker.text()
    asker.ask(a | by_name("a"), prompt)
    assert asker.ask(b | by_name("a"), prompt) == MISS, "another header says nothing"
    assert asker.ask(b, prompt, cache_salt=API_KEY, user="a", prompt_cache_key="a") == MISS, "nor does a body"
    assert asker.ask(a, prompt, user="b", prompt_cache_key="b") == HIT


@pytest.mark.timeout(600)
def test_every_way_to_ask_finds_and_keeps_by_key(api_server: RunningServer) -> None:
    """Texts and tokens, whole and streamed, several choices and beams, of chats and responses: as it is counted."""
    asker = Asker(api_server)
    a, b = by_key(API_KEY), by_key(OTHER_KEYS[0])
    ask: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
        "text": lambda text: (TEXT, {"prompt": text, "max_tokens": 2}),
        "choices": lambda text: (TEXT, {"prompt": text, "max_tokens": 2, "n": 3}),
        "beams": lambda text: (TEXT, {"prompt": text, "max_tokens": 2, "use_beam_search": True, "best_of": 2}),
        "chat": lambda text: (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        "response": lambda text: (RESPONSES, {"input": text, "max_output_tokens": 2}),
    }
    for number, (name, request) in enumerate(ask.items()):
        for headers in (a, b):  # what a template begins with, either may have sent before, in another test
            asker.computed_by(headers, *request("Something else."))
        path, body = request(f"{number} " + "is a number of which there is much to say. " * 9)
        costs = []
        for headers in (a, a, b, b):
            usage, computed = asker.computed_by(headers, path, body)
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            num_tokens = usage.get("prompt_tokens") or usage["input_tokens"]
            assert num_tokens - details["cached_tokens"] <= computed <= num_tokens, name
            costs.append(details["cached_tokens"])
        mine, again, theirs, theirs_again = costs
        assert mine == theirs, name
        assert again == theirs_again > mine, name


@pytest.mark.timeout(600)
def test_a_stream_says_what_was_found(api_server: RunningServer) -> None:
    asker = Asker(api_server, 2)
    prompt = asker.text()
    for expected in (0, FOUND):
        body = {"prompt": prompt, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        answer = httpx.post(f"{api_server.url}{TEXT}", json=body, headers=by_key(API_KEY), timeout=120)
        lines = answer.text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        assert f'"prompt_tokens_details":{{"cached_tokens":{expected}}}' in lines[-2]
        api_server.wait_for_baseline()


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config_file", ["local.yaml", "colocated.yaml"])
def test_clients_are_tenants(one_server: OneServer, config_file: str) -> None:
    changes = {"fairness.by": "header", "prefix_cache.isolation": "client"}
    asker = Asker(one_server.get(f"clients {config_file}", config_file, changes))
    a, b, c = map(by_name, "abc")
    check_apart(asker, a, b)
    check_apart(asker, a, {})
    check_guesses(asker, a, b, c)
    check_guesses(asker, a, {}, c)
    check_salts(asker, a, b)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config_file", ["local.yaml", "colocated.yaml"])
def test_keys_are_tenants_in_every_layout(one_server: OneServer, config_file: str) -> None:
    keys = {"auth.api_keys_file": "\n".join((API_KEY, *OTHER_KEYS))}
    asker = Asker(one_server.get(f"keys {config_file}", config_file, {}, keys))
    a, b, c = by_key(API_KEY), *map(by_key, OTHER_KEYS)
    check_apart(asker, a, b)
    check_guesses(asker, a, b, c)
    check_salts(asker, a, b)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config_file", ["local.yaml", "colocated.yaml"])
def test_without_isolation_all_are_one_tenant_that_bodies_divide(one_server: OneServer, config_file: str) -> None:
    keys = {"auth.api_keys_file": "\n".join((API_KEY, *OTHER_KEYS))}
    asker = Asker(one_server.get(f"none {config_file}", config_file, {"prefix_cache.isolation": "none"}, keys))
    a, b = by_key(API_KEY), by_key(OTHER_KEYS[0])
    prompt = asker.text()
    assert [asker.ask(headers, prompt) for headers in (a, b, a)] == [MISS, HIT, HIT]
    salted = [asker.ask(headers, prompt, cache_salt="x") for headers in (a, b)]
    assert salted == [MISS, HIT], "who knows the salt finds it"
    assert asker.ask(b, prompt, cache_salt="y") == MISS


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_without_a_cache_nothing_is_found_and_usage_does_not_speak_of_it(one_server: OneServer) -> None:
    server = one_server.get("no cache", "colocated.yaml", {"prefix_cache.enabled": False})
    asker = Asker(server)
    prompt = asker.text()
    body = {"prompt": prompt, "max_tokens": 2}
    for _ in range(2):
        usage, computed = asker.computed_by({}, TEXT, body)
        assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert computed == LENGTH
