"""A server of a few lines, in a thread, that streams chat answers or fails as it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer(ThreadingHTTPServer):
    """Answers with the last message's words, backwards. What it does wrong is that message: see `_Handler.do_POST`."""

    daemon_threads = True

    def __init__(self, key: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self._may_pass():
            models = {"/v1/models": {"data": [{"id": "the-model"}]}, "/odd/v1/models": {"data": []}}
            self._json(200, models[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if not self._may_pass():
            return
        text: str = body["messages"][-1]["content"]
        if text == "be full":
            self._json(429, {"error": {"message": "8 requests\nare waiting", "code": "queue_full"}})
            return
        self.send_response(200)
        self.end_headers()
        words = text.split()[::-1]
        for index, word in enumerate(words):
            self._event({"choices": [{"delta": {"content": word if not index else f" {word}"}}]})
            if text == "break now":
                return
            if text == "fail now":
                self._event({"error": {"message": "the worker died"}})
                return
        reason = "length" if body.get("max_tokens") == len(words) else "stop"
        self._event({"choices": [{"delta": {}, "finish_reason": reason}]})
        self._event({"choices": [], "usage": {"completion_tokens": len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _may_pass(self) -> bool:
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._json(401, {"error": {"message": "a key is needed"}})
        return False

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def chat_server(key: str | None = None) -> Iterator[ChatServer]:
    """A running one. key: what a client must show."""
    server = ChatServer(key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
