"""A Hugging Face Hub on loopback: some repositories, and the ways in which it refuses others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

SHA = "0123456789abcdef0123456789abcdef01234567"
NUM_WEIGHTS = 64_000_000  # that it says of each
Files = Mapping[str, bytes]


class _Handler(BaseHTTPRequestHandler):
    repositories: Mapping[str, Files]
    # By repository: status and error code, for whom asks for the repository ("") or for a file of it.
    refusals: Mapping[str, tuple[str, int, str]]
    slow: tuple[str, ...]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        is_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in self.slow:
            time.sleep(30)
        kind, status, code = self.refusals.get(name, ("", 0, ""))
        if status and (kind == "all" or not is_api):
            self._send(status, b'{"error": "refused"}', {"X-Error-Code": code} if code else {}, with_body)
        elif name not in self.repositories:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
        elif is_api and rest[:1] == ["tree"]:
            self._send(200, json.dumps(self._tree(name)).encode(), {}, with_body)
        elif is_api:
            self._send(200, json.dumps(self._info(name)).encode(), {}, with_body)
        else:
            self._file(name, "/".join(rest[2:]), with_body)

    def _info(self, name: str) -> dict[str, object]:
        files = self.repositories[name]
        siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
        counted = {"parameters": {"F32": NUM_WEIGHTS}, "total": NUM_WEIGHTS}
        return {"_id": "1", "id": name, "sha": SHA, "siblings": siblings, "tags": [], "safetensors": counted}

    def _tree(self, name: str) -> list[dict[str, object]]:
        files = self.repositories[name]
        return [{"type": "file", "path": file, "size": len(of), "oid": _etag(file)} for file, of in files.items()]

    def _file(self, name: str, file: str, with_body: bool) -> None:
        content = self.repositories[name].get(file)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        else:
            self._send(200, content, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": SHA}, with_body)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _etag(file: str) -> str:
    return f"{file.encode().hex():0<40}"[:40]


@contextmanager
def fake_hub(
    repositories: Mapping[str, Files],
    refusals: Mapping[str, tuple[str, int, str]] | None = None,
    slow: tuple[str, ...] = (),
) -> Iterator[str]:
    """Its URL, for HF_ENDPOINT. slow: repositories that it does not answer for."""
    attributes = {"repositories": repositories, "refusals": refusals or {}, "slow": slow}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), attributes))
    server.daemon_threads = True
    server.block_on_close = False
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
