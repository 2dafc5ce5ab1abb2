"""API keys, CORS, request ids: on every route, whatever the answer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from cluster.config.access import AuthConfig
from cluster.http.auth import ApiKeys, load_api_keys
from cluster.user_error import ConfigError
from tests.cluster.api_client import CHAT, TEXT, api_client
from tests.cluster.fake_ingress import FakeIngress
from tests.cluster.letter_source import LetterSource

KEY, OTHER = "sk-Secret-0123456789", "sk-other-0123456789"
PUBLIC = ["/health", "/health/ready", "/metrics", "/version"]
ROUTES = [
    ("POST", CHAT),
    ("POST", TEXT),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/the-model"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nowhere"),
    ("OPTIONS", TEXT),
]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.txt"
    file.write_text(f"# of the first tenant\n{KEY}\n\n{OTHER}\n")
    return {"auth": {"api_keys_file": str(file)}}


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.lower()}", f"bearer {KEY}",
     f"Basic {KEY}", KEY, f"Bearer {KEY}, {OTHER}", "Bearer \xe9"],
)  # fmt: skip
async def test_g02_every_route_needs_a_key(keys: dict[str, Any], authorization: str | None) -> None:
    async with api_client(keys) as c:
        headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
        for method, path in ROUTES:
            response = await c.http.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for path in PUBLIC:
            assert (await c.http.get(path, headers=headers)).status_code == 200
        assert c.ingress.samples("splitserve_request_rejections", reason="auth") == len(ROUTES)
        assert c.ingress.source.specs == []


PATHS = ["//v1/models", "/v1/../health", "/v1/%2e%2e/health", "/health/../v1/models", "/health%2f..%2fv1/models",
         "/HEALTH", "/health/", "/health%00", "/v1/models"]  # fmt: skip


@pytest.mark.parametrize("host", ["x/?", "x/#", "x/health", "health"])
@pytest.mark.parametrize("path", PATHS)
async def test_g01_no_way_around_the_path(keys: dict[str, Any], host: str, path: str) -> None:
    """As bytes on the wire: a client's own library would tidy them up."""
    app = FakeIngress(LetterSource(), keys).app()
    sent: list[Any] = []
    headers = [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"x=/health", "scheme": "http", "http_version": "1.1", "root_path": "", "state": {}}

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] in (401, 404)


async def test_any_of_the_keys_opens_everything(keys: dict[str, Any]) -> None:
    for key in (KEY, OTHER):
        async with api_client(keys, {"Authorization": f"Bearer {key}"}) as c:
            assert (await c.send(TEXT, {})).status_code == 200
            assert (await c.http.get("/v1/models")).status_code == 200
            assert (await c.http.get("/openapi.json")).json()["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]


async def test_which_paths_are_public_is_configured(keys: dict[str, Any]) -> None:
    keys["auth"]["public_paths"] = ["/v1/models"]
    async with api_client(keys) as c:
        assert (await c.http.get("/v1/models")).status_code == 200
        assert (await c.http.get("/health")).status_code == 401


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"  {KEY}  \n")
    monkeypatch.setenv("SOME_KEYS", f"{OTHER}, third-key-of-all ,")
    loaded = load_api_keys(AuthConfig(api_keys_file=file, api_keys_env="SOME_KEYS"))
    assert loaded is not None
    assert [loaded.accept(key.encode()) for key in (KEY, OTHER, "third-key-of-all", "", ",")] == [True] * 3 + [
        False
    ] * 2
    assert load_api_keys(AuthConfig()) is None
    assert KEY not in repr(vars(ApiKeys([KEY])))


def test_a_setting_without_keys_never_opens_the_server(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_text("# nothing yet\n")
    short.write_text("1234567\n")
    for config, part in [
        (AuthConfig(api_keys_file=empty), "no API keys"),
        (AuthConfig(api_keys_file=short), "fewer than 8"),
        (AuthConfig(api_keys_file=tmp_path / "gone"), "cannot be read"),
        (AuthConfig(api_keys_env="NOT_THERE_AT_ALL"), "no API keys in NOT_THERE_AT_ALL"),
    ]:
        with pytest.raises(ConfigError, match=part):
            load_api_keys(config)


# -- CORS ------------------------------------------------------------------------------------------

PAGE = "https://chat.example.org"


async def test_cors_is_off_by_default() -> None:
    async with api_client(headers={"Origin": PAGE}) as c:
        assert "access-control-allow-origin" not in (await c.http.get("/v1/models")).headers


async def test_cors_lets_in_the_pages_it_names(keys: dict[str, Any]) -> None:
    """Without a key for the question beforehand; and with its headers on errors too."""
    sections = {**keys, "cors": {"allow_origins": [PAGE]}}
    async with api_client(sections) as c:
        asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = await c.http.options(TEXT, headers={"Origin": PAGE, **asking})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        refused = await c.http.options(TEXT, headers={"Origin": "https://evil.example", **asking})
        assert "access-control-allow-origin" not in refused.headers
        error = await c.http.get("/v1/models", headers={"Origin": PAGE})
        assert (error.status_code, error.headers["access-control-allow-origin"]) == (401, PAGE)
        error = await c.http.get("/health", headers={"Origin": PAGE, "X-Request-Id": "a b"})
        assert (error.status_code, error.headers["access-control-allow-origin"]) == (400, PAGE)
        assert error.headers["access-control-expose-headers"]


# -- request ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a44_the_clients_id_comes_back_and_two_may_share_it(stream: bool) -> None:
    async with api_client(headers={"X-Request-Id": "x:1/A.b-c"}) as c:
        for fields in ({"max_tokens": 3}, {"max_tokens": 3, "n": 2}, {"temperature": 9}):
            assert (await c.send(TEXT, fields, stream)).headers.get_list("x-request-id") == ["x:1/A.b-c"]
        ids = [generation.generation_id for generation in c.ingress.source.generations]
        assert len(set(ids)) == len(ids) == 2
        for path in (*PUBLIC, "/nowhere"):
            assert (await c.http.get(path)).headers["x-request-id"] == "x:1/A.b-c"


async def test_without_one_every_response_has_its_own() -> None:
    async with api_client() as c:
        ids = [(await c.http.get(path)).headers["x-request-id"] for path in (*PUBLIC, "/nowhere", "/v1/models")]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a\tb", "ä", 'a"b', "{}"])
async def test_an_id_that_could_spoil_a_log_is_refused(request_id: str) -> None:
    async with api_client() as c:
        response = await c.http.get("/health", headers=[(b"X-Request-Id", request_id.encode("utf-8"))])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")
        assert response.headers["x-request-id"].startswith("req-")
