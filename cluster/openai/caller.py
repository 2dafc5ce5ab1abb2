"""Whose request it is, as labels that say no more than that."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from scheduler.generation_spec import SALT_BYTES


@dataclass(frozen=True, slots=True)
class Caller:
    """label: who has the same shares fairly with others; empty: of all that name none. tenant: who has the same may
    find what is kept of each other's prompts; empty: everybody.
    """

    label: str = ""
    tenant: bytes = b""

    def cache_salt(self, asked: str | None) -> bytes:
        """Of a `GenerationSpec`: empty only where neither the tenant nor the client sets a request apart. asked: the
        body's cache_salt; it divides a tenant, and leads to no other one, whatever it is.

        BLAKE2b with the tenant as its key (RFC 7693). Pure: the same in every ingress, after every start.
        """
        if not self.tenant and asked is None:
            return b""
        text = b"" if asked is None else b"asked:" + asked.encode()
        return hashlib.blake2b(text, digest_size=SALT_BYTES, key=self.tenant, person=b"cache salt").digest()
