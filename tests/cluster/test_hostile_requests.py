"""Hostile schemas, expressions and grammars over HTTP: each is compiled or refused by its field, and others go on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from cluster.grammars.grammar_source import GrammarSource
from tests.cluster.api_client import CHAT, TEXT, ApiClient, api_client
from tests.cluster.hostile_grammars import hostile_sources

FIELDS = {
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}


def fields_of(source: GrammarSource) -> bytes:
    """A whole body, written by hand where no JSON library would."""
    text = source.text if source.kind in ("json_schema", "choice") else json.dumps(source.text)
    fields = f'"messages":[{{"role":"user","content":"hi"}}],"max_tokens":1,"{FIELDS[source.kind]}":{text}'
    return f'{{"prompt":"hi",{fields}}}'.encode()


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
            response = await c.send(TEXT, fields_of(source))
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
