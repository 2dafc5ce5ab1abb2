"""Who finds whose prefixes: salts come from who asks, and a body can only divide what is its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from cluster.config.root import Config
from cluster.http.cache_tenant import cache_tenant
from cluster.openai.caller import Caller
from replicas.channels.wire import Decoder, MalformedMessage, encode
from replicas.messages import ChannelAddress, GenerateCall, GenerationSpec
from scheduler.sampling_params import SamplingParams
from tests.cluster.api_client import CHAT, HELLO, RESPONSES, TEXT
from tests.cluster.fake_ingress import FakeIngress
from tests.cluster.letter_source import LetterSource

KEY_A, KEY_B = "sk-of-tenant-a", "sk-of-tenant-b"
BY_HEADER = {"fairness": {"by": "header"}, "prefix_cache": {"isolation": "client"}}
BY_API_KEY = {"fairness": {"by": "api_key"}, "prefix_cache": {"isolation": "client"}}
POOLS = {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO}),
    "completion": (TEXT, {"prompt": "hi"}),
    "token ids": (TEXT, {"prompt": [104, 105]}),
    "several prompts": (TEXT, {"prompt": ["hi", "a", "hi there"]}),
    "n": (CHAT, {"messages": HELLO, "n": 3}),
    "best of": (TEXT, {"prompt": "hi", "best_of": 3}),
    "beams": (TEXT, {"prompt": "hi", "use_beam_search": True, "best_of": 2}),
    "echo": (TEXT, {"prompt": "hi", "echo": True, "max_tokens": 0}),
    "stream": (CHAT, {"messages": HELLO, "stream": True}),
    "grammar": (TEXT, {"prompt": "hi", "guided_choice": ["a", "b"]}),
    "response": (RESPONSES, {"input": "hi"}),
    "streamed response": (RESPONSES, {"input": "hi", "stream": True}),
}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.txt"
    file.write_text(f"{KEY_A}\n{KEY_B}\n")
    return {"auth": {"api_keys_file": str(file)}}


class Client:
    def __init__(self, ingress: FakeIngress, http: httpx.AsyncClient) -> None:
        self.ingress, self.http = ingress, http

    async def salts(self, name: str, key: str = "", headers: dict[str, str] | None = None, **fields: Any) -> set[bytes]:
        """Of the prompts of one request."""
        path, body = BODIES[name]
        sent = (headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        before = len(self.ingress.source.specs)
        response = await self.http.post(path, json={**body, **fields}, headers=sent)
        assert response.status_code == 200, response.text
        specs = self.ingress.source.specs[before:]
        assert len(specs) == (3 if name == "several prompts" else 1)
        return {spec.cache_salt for spec in specs}

    async def salt(self, name: str, key: str = "", headers: dict[str, str] | None = None, **fields: Any) -> bytes:
        (salt,) = await self.salts(name, key, headers, **fields)
        return salt


@asynccontextmanager
async def client(sections: dict[str, Any]) -> AsyncIterator[Client]:
    ingress = FakeIngress(LetterSource(), sections)
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        try:
            yield Client(ingress, http)
        finally:
            ingress.compiler.close()


# -- wherever a spec is made -----------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
async def test_two_keys_have_two_salts_and_one_has_one(name: str, keys: dict[str, Any]) -> None:
    async with client(keys) as c:
        a, b = await c.salt(name, KEY_A), await c.salt(name, KEY_B)
        assert len(a) == len(b) == 16
        assert a != b
        assert a == await c.salt(name, KEY_A)
        assert a == await c.salt("completion", KEY_A), "whatever it asks for"


@pytest.mark.parametrize("name", BODIES)
async def test_the_body_divides_and_leads_to_nobody_else(name: str, keys: dict[str, Any]) -> None:
    async with client(keys) as c:
        a = await c.salt(name, KEY_A)
        tried = {
            "another": await c.salt(name, KEY_A, cache_salt="x"),
            "of b": await c.salt(name, KEY_B, cache_salt="x"),
            "b's key": await c.salt(name, KEY_A, cache_salt=KEY_B),
            "b's salt": await c.salt(name, KEY_A, cache_salt=(await c.salt(name, KEY_B)).hex()),
            "b": await c.salt(name, KEY_B),
            "a": a,
        }
        assert len(set(tried.values())) == len(tried)
        assert all(len(salt) == 16 for salt in tried.values())
        assert tried["another"] == await c.salt(name, KEY_A, cache_salt="x")
        assert a == await c.salt(name, KEY_A, cache_salt=None), "null is left out"


@pytest.mark.parametrize("name", BODIES)
async def test_nobody_is_set_apart_without_isolation_but_who_asks_for_it(name: str) -> None:
    async with client({}) as c:
        assert await c.salt(name) == b"" == await c.salt(name, KEY_A)
        x, y = await c.salt(name, cache_salt="x"), await c.salt(name, cache_salt="y")
        assert len(x) == len(y) == 16
        assert x != y
        assert x == await c.salt(name, KEY_B, cache_salt="x")


async def test_everything_of_a_key_may_be_shared_if_the_config_says_so(keys: dict[str, Any]) -> None:
    async with client(keys | {"prefix_cache": {"isolation": "none"}}) as c:
        assert await c.salt("chat", KEY_A) == b"" == await c.salt("chat", KEY_B)


async def test_without_a_cache_nothing_is_hashed_but_bodies_mean_the_same(keys: dict[str, Any]) -> None:
    async with client(keys | {"prefix_cache": {"enabled": False}}) as c:
        assert await c.salt("chat", KEY_A, cache_salt="x") == b""
        response = await c.http.post(
            TEXT, json={"prompt": "hi", "cache_salt": ""}, headers={"Authorization": f"Bearer {KEY_A}"}
        )
        assert response.status_code == 400


async def test_who_needs_no_key_finds_nothing_of_those_who_have_one(keys: dict[str, Any]) -> None:
    """On a path that is public. A key that is sent there all the same is nobody's unless it is known."""
    keys["auth"]["public_paths"] = [CHAT]
    async with client(keys) as c:
        salts = [await c.salt("chat"), await c.salt("chat", KEY_A), await c.salt("chat", "sk-made-up")]
        assert len(set(salts)) == 3
        assert all(len(salt) == 16 for salt in salts)
        assert salts[0] == await c.salt("chat", headers={"Authorization": "Basic eDp5"})
        assert salts[1] == await c.salt("completion", KEY_A)


# -- by clients ------------------------------------------------------------------------------------


async def test_clients_by_a_header() -> None:
    async with client(BY_HEADER) as c:
        a = await c.salt("chat", headers={"X-Client-Id": "a"})
        assert a == await c.salt("completion", KEY_A, headers={"x-client-id": "a"})
        assert len({a, await c.salt("chat", headers={"X-Client-Id": "b"}), await c.salt("chat")}) == 3
        assert await c.salt("chat") == await c.salt("chat", headers={"X-Client-Id": ""}), "who names none: all together"
        assert len(await c.salt("chat")) == 16


async def test_clients_by_their_keys() -> None:
    async with client(BY_API_KEY) as c:
        a, b = await c.salt("chat", KEY_A), await c.salt("chat", KEY_B)
        assert len({a, b, await c.salt("chat")}) == 3
        assert a == await c.salt("response", KEY_A)


@pytest.mark.parametrize("forged", [["a"], ["a", "a"], ["", "a"], ["a", ""]])
async def test_a_gateway_that_adds_its_header_behind_the_client_s_is_believed(forged: list[str]) -> None:
    """As Envoy does by default. The client can't be who it says, nor share with it."""
    config = Config.model_validate({"pools": POOLS} | BY_HEADER)

    def tenant(*values: str) -> bytes:
        raw = [(b"x-client-id", value.encode()) for value in values]
        return cache_tenant(Headers(raw=raw), config)

    assert tenant("a") != tenant("b")
    assert tenant(*forged, "b") not in (tenant("a"), tenant(""), tenant())


# -- what a salt is --------------------------------------------------------------------------------


def tenant_of(key: bytes, **more: Any) -> bytes:
    config = Config.model_validate({"pools": POOLS, "auth": {"api_keys_env": "KEYS"}, **more})
    return cache_tenant(Headers(raw=[(b"authorization", b"Bearer " + key)]), config)


def test_the_tenant_is_the_same_in_every_process_and_gives_the_key_away_to_nobody() -> None:
    assert tenant_of(b"sk-of-tenant-a").hex() == "82c40de31df4d2bb57cb728c2963c78e"
    assert Caller("", tenant_of(b"sk-of-tenant-a")).cache_salt("x").hex() == "0d83eaff4ed83ebbb40adbd6ab4a7bd2"
    assert tenant_of(b"sk-of-tenant-a") == tenant_of(b" sk-of-tenant-a ")
    assert b"tenant" not in tenant_of(b"sk-of-tenant-a")


def test_isolation_by_key_and_by_client_have_tenants_of_their_own() -> None:
    """While an update goes from one to the other, both are asked."""
    by_client = tenant_of(b"sk-of-tenant-a", **BY_API_KEY)
    assert by_client not in (b"", tenant_of(b"sk-of-tenant-a"))


def test_no_two_callers_share_a_salt() -> None:
    tenants = [b"", *(bytes([i] * 16) for i in range(4)), b"asked:" + bytes(10)]
    asked = [None, "x", "y", "asked:x", "\0", "é", "x" * 512]
    salts = {(tenant, text): Caller("", tenant).cache_salt(text) for tenant in tenants for text in asked}
    assert [pair for pair, salt in salts.items() if not salt] == [(b"", None)]
    for (one, salt), (two, other) in combinations(salts.items(), 2):
        assert salt != other, (one, two)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize(
    ("salt", "reason"),
    [
        ("", "cache_salt must not be empty: leave it out where nobody is to be set apart"),
        ("x" * 513, "cache_salt has 513 characters; at most 512 are allowed"),
        (7, "cache_salt must be a string"),
        (True, "cache_salt must be a string"),
        (["x"], "cache_salt must be a string"),
        ({}, "cache_salt must be a string"),
    ],
)
async def test_what_is_no_salt_is_refused(path: str, salt: Any, reason: str) -> None:
    async with client({}) as c:
        body = {"messages": HELLO} if path == CHAT else {"input": "hi"} if path == RESPONSES else {"prompt": "hi"}
        response = await c.http.post(path, json=body | {"cache_salt": salt})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", "cache_salt")
        assert error["message"] == reason
        assert c.ingress.source.specs == []


async def test_the_longest_salt_is_taken_in_every_script() -> None:
    async with client({}) as c:
        salts = [await c.salt("chat", cache_salt=text) for text in ("x" * 512, "é" * 512, "\0", " ", "🔥")]
        assert len(set(salts)) == 5


@pytest.mark.parametrize("salt", [b"x", bytes(15), bytes(17), bytes(100_000), "0123456789abcdef", None, 7])
def test_a_salt_of_another_length_or_type_does_not_arrive(salt: object) -> None:
    """Salts are of trusted processes; what is malformed all the same never gets into a cache."""
    import msgpack

    spec = GenerationSpec((1,), (0,), 1, frozenset(), SamplingParams(), cache_salt=bytes(range(16)), use_cache=False)
    call = GenerateCall("r", spec, 1.0, ChannelAddress("router", "tcp://x", "key"), None)
    decode: Decoder[GenerateCall] = Decoder(GenerateCall)
    assert decode(encode(call)) == call
    fields = msgpack.unpackb(encode(call))
    fields["spec"]["cache_salt"] = salt
    with pytest.raises(MalformedMessage, match="cache_salt"):
        decode(msgpack.packb(fields))
    fields["spec"] |= {"cache_salt": b"", "use_cache": 0}
    with pytest.raises(MalformedMessage, match="use_cache"):
        decode(msgpack.packb(fields))
