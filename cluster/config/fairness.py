"""How the server's users share it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.section import Section


class FairnessConfig(Section):
    """Whose request a request is. Clients of equal priority get equal shares of tokens where requests wait."""

    by: Literal["none", "api_key", "header"] = Field(
        default="none",
        description="none: all are one client. api_key: the bearer token in Authorization. header: the header below",
    )
    header: str = Field(
        default="X-Client-Id",
        pattern=r"^[A-Za-z0-9-]{1,64}$",
        description="With by header: the header that names the client. Let a gateway set it: who can choose it freely "
        "can be many clients",
    )
