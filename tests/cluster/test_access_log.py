"""One line for each request when it is over, with its figures and without its text."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from cluster.api_error import ApiError
from replicas.structured_log import JsonFormatter, TextFormatter
from tests.cluster.fake_ingress import HANG, LENGTH, FakeIngress, ScriptedSource, Step, text

LOGGER = "cluster.http.access_log"


class Served:
    """What an app has logged, and what it answers."""

    def __init__(self, caplog: pytest.LogCaptureFixture, sections: dict[str, Any] | None = None, **script: Any) -> None:
        caplog.set_level(logging.INFO, LOGGER)
        self._caplog = caplog
        self.ingress = FakeIngress(ScriptedSource(**script), sections)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.ingress.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.request(method, path, **options)

    @property
    def records(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name == LOGGER]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(JsonFormatter().format(record)) for record in self.records]


def script(*steps: Step | Sequence[Step]) -> list[Step]:
    return [step for part in steps for step in (part if isinstance(part, list) else [part])]  # type: ignore[misc]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_line_with_its_figures(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    served = Served(caplog, abc=text(0, "secret", LENGTH))
    body = {"prompt": "abc", "max_tokens": 6, "stream": stream}
    response = await served.request("POST", "/v1/completions?q=1", json=body, headers={"X-Request-Id": "mine"})
    assert response.status_code == 200
    (line,) = served.lines
    assert (line["event"], line["level"], line["message"]) == ("access", "INFO", "POST /v1/completions 200")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["tokens_in"], line["tokens_out"], line["request_id"]) == (3, 6, "mine")
    assert 0.0 <= line["ttft_s"] <= line["duration_s"]
    assert not {"outcome", "code"} & line.keys()
    shown = TextFormatter().format(served.records[0]).partition(" ")[2]
    assert shown.startswith("INFO POST /v1/completions 200 tokens_in=3 tokens_out=6 ttft_s=")
    assert shown.endswith(" request_id=mine")
    assert "secret" not in caplog.text
    assert "abc" not in caplog.text


async def test_a_refused_one_has_its_code(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(caplog, abc=[ApiError(429, "full", code="queue_full")])
    await served.request("POST", "/v1/completions", json={"prompt": "abc"})
    await served.request("POST", "/v1/completions", json={"prompt": 3})
    found = [(line["status"], line["code"], line["outcome"], line.get("tokens_in")) for line in served.lines]
    assert found == [(429, "queue_full", "rejected", 3), (400, "invalid_value", "client_error", None)]


async def test_a_stream_that_ends_in_an_error_says_so_beside_its_200(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(caplog, abc=script(text(0, "xy"), ApiError(503, "gone", code="unavailable")))
    await served.request("POST", "/v1/completions", json={"prompt": "abc", "stream": True, "max_tokens": 9})
    (line,) = served.lines
    assert (line["status"], line["outcome"], line["code"], line["tokens_out"]) == (200, "rejected", "unavailable", 2)


async def test_a_client_that_went_before_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(caplog, abc=[HANG])
    asked = asyncio.create_task(served.request("POST", "/v1/completions", json={"prompt": "abc"}))
    while not served.ingress.source.open_prompts:
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked})
    (line,) = served.lines
    assert (line["status"], line["outcome"], line["tokens_out"]) == (499, "cancelled", 0)


async def test_other_paths_have_one_too_but_probes_have_none(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(caplog)
    for path in ("/health", "/health/ready", "/metrics", "/v1/models", "/nothing"):
        await served.request("GET", path)
    assert [(line["path"], line["status"]) for line in served.lines] == [("/v1/models", 200), ("/nothing", 404)]
    assert all(line["request_id"].startswith("req-") for line in served.lines)


async def test_what_a_client_asks_for_makes_no_second_line(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(caplog)
    await served.request("GET", "/a%0aINFO%20forged%1b[31m" + "x" * 300)
    (record,) = served.records
    shown = TextFormatter().format(record)
    assert "\n" not in shown
    assert "\x1b" not in shown
    assert "GET /a\\nINFO forged\\x1b[31mxxx" in shown
    assert len(shown) < 400


@pytest.mark.parametrize("logging_section", [{"access": False}, {}])
async def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture, logging_section: dict[str, Any]) -> None:
    served = Served(caplog, {"logging": logging_section})
    await served.request("GET", "/v1/models")
    assert len(served.lines) == (0 if logging_section else 1)


async def test_a_log_of_warnings_only_has_none(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(caplog)
    caplog.set_level(logging.WARNING, LOGGER)
    await served.request("GET", "/v1/models")
    assert served.lines == []
