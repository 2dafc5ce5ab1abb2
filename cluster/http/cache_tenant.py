"""Who may find what prefix caches keep of a request: told by its headers, never by its body."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cluster.http.auth import bearer_key
from cluster.http.client_label import client_label
from scheduler.generation_spec import SALT_BYTES

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from cluster.config.serving import ServingConfig


def cache_tenant(headers: Headers, config: ServingConfig) -> bytes:
    """The same for all requests of one tenant, in every ingress and after every start, with other keys beside its own
    or not; empty where nobody is told apart. Who sends no key, or names no client, is one tenant with all the others.

    A hash of the API key, or of the client's label, with itself as its key: nobody gets another's without knowing that.
    """
    if not config.prefix_cache.enabled or config.cache_isolation == "none":
        return b""
    if config.cache_isolation == "key":
        return _tenant(b"api key", bearer_key(headers.raw) or b"")
    return _tenant(b"client", client_label(headers, config.fairness).encode())


def _tenant(kind: bytes, name: bytes) -> bytes:
    key = hashlib.sha256(name).digest()  # a name of any length
    return hashlib.blake2b(digest_size=SALT_BYTES, key=key, person=kind).digest()
