"""`cached_tokens` in usage: what of a prompt nobody had to compute, whatever fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cluster.monitoring.cache_finding import CacheFinding
from cluster.routing.generation import Generation, GenerationItem
from replicas.messages import CallStatus
from tests.cluster.api_client import CHAT, HELLO, RESPONSES, TEXT, events_in
from tests.cluster.fake_ingress import STOP, FakeIngress, text
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.letter_source import LetterSource
from tests.cluster.router_rig import running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")

# -- what attempts tell ----------------------------------------------------------------------------


def test_of_one_attempt_the_most_counts() -> None:
    finding = CacheFinding()
    assert (finding.num_tokens, finding.is_local) == (0, None)
    for num_tokens in (16, 48, 32):
        finding.tell("a", num_tokens, is_local=False)
    assert (finding.num_tokens, finding.is_local) == (48, False)


def test_of_several_attempts_the_first_that_told_counts_though_it_found_nothing() -> None:
    finding = CacheFinding()
    finding.tell("a", 0, is_local=False)
    finding.tell("b", 48, is_local=True)
    finding.tell("a", 16, is_local=False)
    assert (finding.num_tokens, finding.is_local) == (16, False)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("cached", "found"), [((0, 0), 0), ((2, 0), 0), ((0, 4), 4), ((2, 4), 4), ((4, 2), 2)])
async def test_prefill_and_decode_found_some(cached: tuple[int, int], found: int, n: int) -> None:
    generation = generation_of(n=n)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(cached=cached))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert (generation.finding.num_tokens, generation.finding.is_local) == (found, False)


async def test_decode_that_computes_the_prompt_found_some() -> None:
    generation = generation_of()
    async with running_router(FakeCluster(num_prefill=0)) as rig:
        rig.cluster.play(Script(cached=(3, 0)))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert (generation.finding.num_tokens, generation.finding.is_local) == (3, True)


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
async def test_it_is_known_with_the_first_token(num_prefill: int) -> None:
    """So no end of a stream waits for it: neither a reply of decode nor its last frame is needed."""
    generation = generation_of(max_tokens=8)
    async with running_router(FakeCluster(num_prefill=num_prefill)) as rig:
        rig.cluster.play(Script(Fault(Phase.DECODE, "hang", 1), cached=(4, 3)))
        tokens = rig.router.generate(generation)
        assert await anext(tokens)
        assert generation.finding.num_tokens == (3 if num_prefill else 4)
        await tokens.aclose()


async def test_never_more_than_the_client_s_prompt_has() -> None:
    """A replica that says so is wrong; nobody pays less for it."""
    generation = generation_of(1, 2, 3)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(cached=(1000, 9)))
        await rig.tokens(generation)
        assert generation.finding.num_tokens == 3


@pytest.mark.parametrize("first", [(0, 0), (2, 0), (0, 2)])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_replay_finds_what_the_request_itself_had_computed_and_that_does_not_count(
    first: tuple[int, int], n: int
) -> None:
    generation = generation_of(n=n)
    async with running_router(FakeCluster(2, 2)) as rig:
        again = [Script(cached=(5, 5))] * n
        rig.cluster.play(Script(Fault(Phase.DECODE, CallStatus.ERROR, 2), cached=first), *again)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 1
        assert len(rig.cluster.requests) == 1 + n
        assert generation.finding.num_tokens == first[1]  # prefill's


async def test_an_attempt_that_failed_before_it_told_does_not_count() -> None:
    generation = generation_of()
    async with running_router(FakeCluster(2, 2)) as rig:
        rig.cluster.play(Script(Fault(Phase.PREFILL, CallStatus.ERROR), cached=(5, 5)), Script(cached=(2, 2)))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert (len(rig.cluster.struck), len(rig.cluster.requests)) == (1, 2)
        assert generation.finding.num_tokens == 2


async def test_the_kv_did_not_arrive_after_prefill_had_told() -> None:
    generation = generation_of()
    async with running_router(FakeCluster(2, 2)) as rig:
        rig.cluster.play(Script(Fault(Phase.TRANSFER, CallStatus.KV_LOST), cached=(0, 2)), Script(cached=(5, 5)))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert (len(rig.cluster.struck), len(rig.cluster.requests)) == (1, 2)
        assert generation.finding.num_tokens == 2


# -- what clients get ------------------------------------------------------------------------------


class FindingSource(LetterSource):
    """Finds so many tokens of each prompt, in this order; some at prefill, all at decode: with the second token."""

    def __init__(self, *found: int) -> None:
        super().__init__()
        self._found = found

    async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
        found = self._found[len(self.generations)]
        generation.finding.tell("a", found // 2, is_local=False)
        async for items in super().generate(generation):
            yield items
            generation.finding.tell("a", found, is_local=False)


@asynccontextmanager
async def client(*found: int, **sections: Any) -> AsyncIterator[tuple[FakeIngress, httpx.AsyncClient]]:
    ingress = FakeIngress(FindingSource(*found), sections)
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield ingress, http


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "chat": (CHAT, {"messages": HELLO}, (2,), 2),
    "completion": (TEXT, {"prompt": "hi"}, (2,), 2),
    "token ids": (TEXT, {"prompt": [1, 2, 3]}, (2,), 2),
    "n": (CHAT, {"messages": HELLO, "n": 3}, (2,), 2),
    "best of": (TEXT, {"prompt": "hi", "best_of": 3}, (2,), 2),
    "beams": (TEXT, {"prompt": "hi", "use_beam_search": True, "best_of": 2}, (2,), 2),
    "several prompts": (TEXT, {"prompt": ["abc", "defg", "hi"], "n": 2}, (2, 0, 1), 3),
    "nothing found": (TEXT, {"prompt": "hi"}, (0,), 0),
}


@pytest.mark.parametrize("name", CASES)
async def test_usage_says_it(name: str) -> None:
    path, body, found, expected = CASES[name]
    async with client(*found) as (ingress, http):
        usage = (await http.post(path, json={"max_tokens": 6} | body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "they are part of these"
        assert ingress.samples("splitserve_cached_prompt_tokens", route="remote") == expected
        assert ingress.samples("splitserve_routed_prompt_tokens", route="remote") == usage["prompt_tokens"]
        assert ingress.samples("splitserve_routed_prompt_tokens", route="local") == 0


@pytest.mark.parametrize("name", [name for name in CASES if name != "best of"])
async def test_the_last_chunk_of_a_stream_says_it(name: str) -> None:
    path, body, found, expected = CASES[name]
    async with client(*found) as (_, http):
        options = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, done = events_in((await http.post(path, json=options | body)).content)
        assert done == "[DONE]"
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": expected}


async def test_continuous_usage_says_what_is_known_so_far() -> None:
    async with client(2) as (_, http):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "hi", "max_tokens": 6, "stream": True, "stream_options": options}
        *chunks, _ = events_in((await http.post(TEXT, json=body)).content)
        found = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks]
        assert found == sorted(found)
        assert found[-1] == 2


async def test_a_response_says_it_whole_and_in_its_last_event() -> None:
    async with client(2, 2) as (_, http):
        body = {"input": "hi", "max_output_tokens": 6}
        whole = (await http.post(RESPONSES, json=body)).json()
        assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
        content = (await http.post(RESPONSES, json=body | {"stream": True})).text
        assert '"input_tokens_details":{"cached_tokens":2,' in content.split("event: ")[-1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_a_cache_usage_does_not_speak_of_it(path: str) -> None:
    async with client(0, prefix_cache={"enabled": False}) as (_, http):
        body = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
        usage = (await http.post(path, json=body | {"max_tokens": 6})).json()["usage"]
        assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}


async def test_the_access_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cluster.http.access_log")
    async with client(2, 0) as (_, http):
        for _ in range(2):
            await http.post(TEXT, json={"prompt": "hi", "max_tokens": 6})
    lines = [record for record in caplog.records if record.name == "cluster.http.access_log"]
    assert [getattr(line, "tokens_cached", None) for line in lines] == [2, None]
    assert [line.tokens_in for line in lines] == [2, 2]  # type: ignore[attr-defined]


async def test_a_request_that_failed_before_its_first_token_is_no_part_of_the_metrics() -> None:
    class Failing(FindingSource):
        async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
            generation.finding.tell("a", 2, is_local=True)
            raise RuntimeError("engine")
            yield [*text(0, "x", STOP)]

    ingress = FakeIngress(Failing(2))
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.post(TEXT, json={"prompt": "hi"})).status_code == 500
    assert ingress.samples("splitserve_cached_prompt_tokens") == 0
    assert ingress.samples("splitserve_prompt_tokens") == 0
