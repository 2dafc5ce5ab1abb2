"""Hostile schemas, expressions and grammars over HTTP: each is compiled or refused by its field, and others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.cluster.api_client import CHAT, TEXT, ApiClient, api_client
from tests.cluster.hostile_grammars import FIELDS, body_of, hostile_sources


async def others(c: ApiClient, statuses: Counter[int]) -> None:
    while True:
        statuses[(await c.http.get("/health")).status_code] += 1
        statuses[(await c.send(CHAT, {"guided_regex": "[a-z]+", "max_tokens": 2})).status_code] += 1
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_300_of_them_harm_nobody() -> None:
    outcomes: Counter[Any] = Counter()
    statuses: Counter[int] = Counter()
    async with api_client() as c:
        assert (await c.send(CHAT, {"guided_regex": "[a-z]+", "max_tokens": 2})).status_code == 200
        beside = asyncio.ensure_future(others(c, statuses))
        for name, source in hostile_sources():
            response = await c.send(TEXT, body_of(source))
            outcome: Any = response.status_code
            if outcome == 400:
                error = response.json()["error"]
                outcome = (400, error["code"])
                assert error["param"] in (FIELDS[source.kind], None), (name, error)
                assert len(error["message"]) < 800, name
            outcomes[outcome] += 1
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        assert statuses.keys() == {200}
        assert statuses[200] > 100
    assert outcomes.keys() == {200, (400, "grammar_refused"), (400, "invalid_value"), (400, "invalid_json")}, outcomes
    assert outcomes.total() > 300
    assert outcomes[200] > 50
    assert outcomes[400, "grammar_refused"] > 100
