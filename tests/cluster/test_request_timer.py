"""What an HTTP request leaves in the metrics: beams and echoes too."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from replicas.messages import Token
from tests.cluster.api_client import TEXT
from tests.cluster.fake_ingress import LENGTH, STOP, FakeIngress, ScriptedSource, Step, text

HISTOGRAMS = {
    "ttft": "splitserve_time_to_first_token_seconds",
    "itl": "splitserve_inter_token_latency_seconds",
    "tpot": "splitserve_request_time_per_output_token_seconds",
    "e2e": "splitserve_e2e_request_latency_seconds",
}
# That nothing misses, however long this machine stands still: the usual ones leave a token 0.1 s.
PATIENT = {"slo": {"ttft_s": 3600.0, "tpot_s": 3600.0}}


async def after(script: list[Step], sections: dict[str, Any] | None = None, **fields: Any) -> FakeIngress:
    """The ingress after one request for the completion of "a"."""
    ingress = FakeIngress(ScriptedSource(a=script), sections)
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.post(TEXT, json={"prompt": "a", **fields})
        assert response.status_code == 200, response.text
    return ingress


def counts(ingress: FakeIngress) -> dict[str, float]:
    return {name: ingress.samples(family, "_count") for name, family in HISTOGRAMS.items()}


def tokens(ingress: FakeIngress) -> tuple[float, float]:
    return ingress.samples("splitserve_prompt_tokens"), ingress.samples("splitserve_generation_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_every_token_counts_once(stream: bool) -> None:
    script = [*text(0, "bcd", LENGTH), *text(1, "e", STOP)]
    ingress = await after(script, PATIENT, n=2, max_tokens=3, stream=stream)
    assert counts(ingress) == {"ttft": 1, "itl": 2, "tpot": 1, "e2e": 1}
    assert tokens(ingress) == (1, 4)
    assert ingress.samples("splitserve_request_generation_tokens", "_sum") == 4
    assert ingress.samples("splitserve_slo_requests", slo="ttft") == 1
    assert ingress.samples("splitserve_slo_requests", slo="any") == 1
    assert ingress.samples("splitserve_slo_violations") == 0


async def test_a_beam_search_is_timed_as_a_whole_only() -> None:
    beams = [*text(0, "bcd", LENGTH), *text(1, "efg", LENGTH)]
    ingress = await after(beams, use_beam_search=True, n=2, max_tokens=3)
    assert counts(ingress) == {"ttft": 0, "itl": 0, "tpot": 0, "e2e": 1}
    assert tokens(ingress) == (1, 6)
    assert ingress.samples("splitserve_slo_requests", slo="ttft") == 0
    assert ingress.samples("splitserve_slo_requests", slo="any") == 1


async def test_an_echo_costs_no_token() -> None:
    ingress = await after([Token("", 0, 0, ord("z"), LENGTH)], echo=True, max_tokens=0)
    assert counts(ingress) == {"ttft": 0, "itl": 0, "tpot": 0, "e2e": 1}
    assert tokens(ingress) == (1, 0)
    assert ingress.samples("splitserve_request_generation_tokens", "_sum") == 0
    assert ingress.samples("splitserve_request_success", finish_reason="length") == 1


async def test_objectives_of_the_config_are_what_is_missed() -> None:
    slo = {"slo": {"ttft_s": 1e-9, "tpot_s": 100.0, "e2e_s": 1e-9}}
    ingress = await after(text(0, "bcd", LENGTH), slo, max_tokens=3)
    missed = {name: ingress.samples("splitserve_slo_violations", slo=name) for name in ("ttft", "tpot", "e2e", "any")}
    assert missed == {"ttft": 1, "tpot": 0, "e2e": 1, "any": 1}


async def test_a_request_that_fails_is_judged_and_not_timed() -> None:
    ingress = FakeIngress(ScriptedSource(a=[RuntimeError("broken")]))
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.post(TEXT, json={"prompt": "a"})).status_code == 500
    assert counts(ingress) == {"ttft": 0, "itl": 0, "tpot": 0, "e2e": 0}
    assert ingress.samples("splitserve_slo_violations", slo="any") == 1
    assert tokens(ingress) == (0, 0)
