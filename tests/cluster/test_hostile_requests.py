"""Hostile schemas, expressions and grammars over HTTP: each is compiled or refused by its field, and others go on."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from cluster.grammars.grammar_source import GrammarSource
from tests.cluster.api_client import CHAT, RESPONSES, TEXT, ApiClient, api_client
from tests.cluster.hostile_grammars import FIELDS, body_of, hostile_sources


async def others(c: ApiClient, statuses: Counter[int]) -> None:
    while True:
        statuses[(await c.http.get("/health")).status_code] += 1
        statuses[(await c.send(CHAT, {"guided_regex": "[a-z]+", "max_tokens": 2})).status_code] += 1
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
async def test_300_of_them_harm_nobody(every: int) -> None:
    """Or some of each kind: tests/cluster/test_grammar_compiler.py has all of them, without HTTP."""
    outcomes: Counter[Any] = Counter()
    statuses: Counter[int] = Counter()
    async with api_client() as c:
        assert (await c.send(CHAT, {"guided_regex": "[a-z]+", "max_tokens": 2})).status_code == 200
        beside = asyncio.ensure_future(others(c, statuses))
        for name, source in itertools.islice(hostile_sources(), None, None, every):
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
        assert statuses[200] > 100 / every
    assert outcomes.keys() == {200, (400, "grammar_refused"), (400, "invalid_value"), (400, "invalid_json")}, outcomes
    assert outcomes.total() > 300 / every
    assert outcomes[200] > 50 / every
    assert outcomes[400, "grammar_refused"] > 100 / every


async def test_each_request_s_grammars_are_compiled_in_its_own_client_s_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So whoever sends slow ones without end makes nobody wait but itself."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    function = {"name": "f", "parameters": schema}
    forced = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    asked: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"guided_regex": "[a-z]+"}),
        (CHAT, {"response_format": form}),
        (CHAT, forced),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {**schema, "title": "r"}}}}),
    ]
    clients: list[str] = []
    async with api_client({"fairness": {"by": "header"}}) as c:
        compile_now = c.ingress.compiler.compile

        async def noted(source: GrammarSource, client: str) -> str:
            clients.append(client)
            return await compile_now(source, client)

        monkeypatch.setattr(c.ingress.compiler, "compile", noted)
        labels = []
        for number, (path, fields) in enumerate(asked):
            c.http.headers["X-Client-Id"] = f"tenant {number}"
            clients.clear()
            response = await c.send(path, {**fields, "max_output_tokens" if path == RESPONSES else "max_tokens": 2})
            assert response.status_code == 200, response.text
            (label,) = set(clients)
            assert label
            labels.append(label)
    assert len(set(labels)) == len(asked)
