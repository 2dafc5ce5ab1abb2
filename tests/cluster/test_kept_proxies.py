"""An ingress keeps handles of the proxies that it has served."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from cluster.serving import kept_proxies
from cluster.serving.kept_proxies import keep_proxies


class Handle:
    pass


class Request:
    """As Serve's own: it looks its proxy up once, and lets go of it when it is over."""

    def __init__(self, name: str | None, handles: dict[str, Any]) -> None:
        self._proxy_actor_name, self._handles = name, handles
        self._cached_proxy_actor: Any = None

    @property
    def receive_asgi_messages(self) -> Any:
        if self._proxy_actor_name is None:
            return "given"
        self._cached_proxy_actor = self._handles[self._proxy_actor_name]
        return self._cached_proxy_actor


def request_class() -> Any:
    return type("OneRequest", (Request,), {"receive_asgi_messages": Request.receive_asgi_messages})


def test_a_proxy_is_kept_when_its_request_is_over_and_its_successor_in_its_place() -> None:
    cls = request_class()
    keep_proxies(cls)
    first, second = Handle(), Handle()
    seen = weakref.ref(first)
    assert cls("proxy", {"proxy": first}).receive_asgi_messages is first
    del first
    gc.collect()
    assert seen() is not None
    assert cls("proxy", {"proxy": second}).receive_asgi_messages is second
    gc.collect()
    assert seen() is None
    assert cls(None, {}).receive_asgi_messages == "given"


def test_so_many_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_proxies, "_MOST", 3)
    cls = request_class()
    keep_proxies(cls)
    handles = {str(number): Handle() for number in range(9)}
    seen = {name: weakref.ref(handle) for name, handle in handles.items()}
    for name in [*handles, "6"]:
        assert cls(name, handles).receive_asgi_messages is handles[name]
    handles.clear()
    gc.collect()
    assert [name for name, handle in seen.items() if handle() is not None] == ["6", "7", "8"]


def test_ray_as_it_is_pinned_has_what_is_replaced() -> None:
    from ray.serve._private.common import StreamingHTTPRequest

    assert isinstance(vars(StreamingHTTPRequest)["receive_asgi_messages"], property)
    assert {"_proxy_actor_name", "_cached_proxy_actor"} <= set(StreamingHTTPRequest.__init__.__code__.co_names)


def test_without_it_that_is_said_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    keep_proxies(type("Other", (), {}))
    assert "Ray has changed" in caplog.text
