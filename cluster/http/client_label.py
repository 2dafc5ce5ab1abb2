"""Whose request it is, as a label that says no more than that."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from cluster.config.fairness import FairnessConfig


def client_label(headers: Headers, fairness: FairnessConfig) -> str:
    """The same for the same client in every ingress; "" for all that name none.

    Of a header that came several times all count: where a gateway adds its own behind the client's, the client can't
    take another's name. A hash, so that neither a key nor what a header says gets into other processes, their metrics
    or logs.
    """
    if fairness.by == "none":
        return ""
    is_by_key = fairness.by == "api_key"
    values = ", ".join(headers.getlist("authorization" if is_by_key else fairness.header))
    name = _bearer(values) if is_by_key else values
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest() if name else ""


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
