"""python -m benchmarks.gpu.handing_proxy PORT PREFILL_URL DECODE_URL: in front of two vLLM that hand KV over by NIXL.

As its NixlConnector is meant to be used (vLLM's documentation of it): a request goes to the first server for one token,
with the word that its KV is to be kept; where it lies is in the answer, and goes with the request to the second server,
which reads it and streams the whole text, first token included. Here what comes from there passes unread.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from benchmarks.gpu.child_server import child_server
from benchmarks.real_server import free_port

_READY_TIMEOUT_S = 30.0
_PATH = "/v1/completions"
# What only the whole answer has.
_OF_THE_ANSWER = ("stream", "stream_options", "min_tokens", "max_tokens")
_KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What the server is asked that computes the prompt."""
    kept = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": _KEEP}


def decode_body(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What the server is asked that generates. Raises ValueError where the other one kept nothing: then this one would
    compute the prompt itself, and that is not what is measured."""
    where = answer.get("kv_transfer_params")
    if not where or not where.get("do_remote_prefill"):
        raise ValueError(f"nothing was kept to hand over: kv_transfer_params is {where}")
    return body | {"kv_transfer_params": where}


def app(prefill_url: str, decode_url: str) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        session: ClientSession = request.app[_SESSION]
        body = await request.json()
        async with session.post(prefill_url + _PATH, json=prefill_body(body)) as prefilled:
            if prefilled.status != 200:
                return web.Response(status=prefilled.status, body=await prefilled.read())
            try:
                asked = decode_body(body, await prefilled.json())
            except ValueError as error:
                return web.Response(status=502, text=str(error))
        async with session.post(decode_url + _PATH, json=asked) as decoded:
            response = web.StreamResponse(status=decoded.status, headers={"Content-Type": decoded.content_type})
            await response.prepare(request)
            async for piece in decoded.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def session(application: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)) as made:
            application[_SESSION] = made
            yield

    application = web.Application(client_max_size=1 << 26)
    application.cleanup_ctx.append(session)
    application.add_routes([web.post(_PATH, complete), web.get("/health", health)])
    return application


_SESSION = web.AppKey("session", ClientSession)


@contextmanager
def handing(prefill_url: str, decode_url: str, folder: Path) -> Iterator[str]:
    """The URL in front of both, in a process of its own, until the end. Blocks, and raises, as `child_server`."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gpu.handing_proxy", str(port), prefill_url, decode_url]
    url, root = f"http://127.0.0.1:{port}", Path(__file__).parents[2]
    with child_server(command, url, folder / "handing.log", _READY_TIMEOUT_S, folder=root):
        yield url


if __name__ == "__main__":
    web.run_app(app(*sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), print=None)
