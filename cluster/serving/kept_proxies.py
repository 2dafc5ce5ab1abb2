"""An ingress keeps a hold of the proxies that it has served, so that no request of theirs needs Ray's GCS.

For each HTTP request Serve has its replica look up the proxy, by name, to read the body from. Ray remembers names of
actors only while something refers to them. So the first request after a silence asks the GCS, and that blocks the
event loop: while the GCS stands still, or a cluster's head is being replaced, all that this ingress does would stand
still. Ray is pinned; tests/server/test_gcs.py covers this.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

_MOST = 1024  # nodes come and go; the oldest are let go first
_LOOK_UP, _NAME, _HANDLE = "receive_asgi_messages", "_proxy_actor_name", "_cached_proxy_actor"


def keep_proxies(request_class: Any) -> None:
    """From now on, in this process. request_class: Serve's of the HTTP requests that replicas get."""
    looked_up = vars(request_class).get(_LOOK_UP)
    if not isinstance(looked_up, property) or looked_up.fget is None:
        logger.warning("Ray has changed: requests may wait for its GCS", extra={"event": "proxies_not_kept"})
        return
    look_up = looked_up.fget
    kept: dict[str, Any] = {}

    def look_up_and_keep(request: Any) -> Any:
        receive = look_up(request)
        if (name := getattr(request, _NAME, None)) is not None:
            kept.pop(name, None)  # one of the same name may be another one: Ray notices, and looks it up again
            kept[name] = getattr(request, _HANDLE, None)
            while len(kept) > _MOST:
                del kept[next(iter(kept))]
        return receive

    setattr(request_class, _LOOK_UP, property(look_up_and_keep))
