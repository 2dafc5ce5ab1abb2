"""Whose request it is, as a label that says no more than that."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.config.fairness import FairnessConfig


def client_label(headers: Mapping[str, str], fairness: FairnessConfig) -> str:
    """The same for the same client in every ingress; "" for all that name none. headers: by case-insensitive name.

    A hash, so that neither a key nor what a header says gets into other processes, their metrics or logs.
    """
    if fairness.by == "none":
        return ""
    name = _bearer(headers.get("authorization", "")) if fairness.by == "api_key" else headers.get(fairness.header, "")
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest() if name else ""


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
