"""`prediction`: what a body may say, what becomes of it on its way to the engines, and what usage says of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cluster.monitoring.draft_finding import DraftFinding
from cluster.routing.generation import Generation, GenerationItem
from replicas.messages import CallStatus
from tests.cluster.api_client import CHAT, HELLO, RESPONSES, TEXT, events_in
from tests.cluster.fake_ingress import FakeIngress
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.letter_source import LetterSource
from tests.cluster.router_rig import running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")

NGRAM = {"speculative": {"method": "ngram"}}


class DraftingSource(LetterSource):
    """Has had so many drafts, of which so many held, of each prompt: half of them with the first token."""

    def __init__(self, *counts: tuple[int, int]) -> None:
        super().__init__()
        self._counts = counts

    async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
        drafted, accepted = self._counts[len(self.generations)] if self._counts else (0, 0)
        generation.drafts.tell("a", drafted // 2, accepted // 2)
        async for items in super().generate(generation):
            yield items
            generation.drafts.tell("a", drafted, accepted)


@asynccontextmanager
async def client(*counts: tuple[int, int], **sections: Any) -> AsyncIterator[tuple[DraftingSource, httpx.AsyncClient]]:
    source = DraftingSource(*counts)
    transport = httpx.ASGITransport(app=FakeIngress(source, sections).app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield source, http


def content(value: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": value}}


# -- what a body may say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("class A:", b"class A:"),
        ("", b""),
        ([{"type": "text", "text": "class "}, {"type": "text", "text": "A:"}], b"class A:"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": ["hi", "ho"]})])
async def test_it_goes_to_the_engines_as_ids(path: str, body: dict[str, Any], value: Any, expected: bytes) -> None:
    async with client(**NGRAM) as (source, http):
        assert (await http.post(path, json={"max_tokens": 4} | body | content(value))).status_code == 200
        assert {spec.predicted_ids for spec in source.specs} == {tuple(expected)}


async def test_every_choice_has_it_and_whatever_else_is_asked_for() -> None:
    """OpenAI refuses it beside n, logprobs and tools: here it changes nothing that these could tell."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HELLO, "max_tokens": 4, "n": 3, "logprobs": True, "tools": tools} | content("ab")
    async with client(**NGRAM) as (source, http):
        assert (await http.post(CHAT, json=body)).status_code == 200
        (spec,) = source.specs
        assert (spec.choices, spec.predicted_ids) == ((0, 1, 2), (97, 98))


async def test_no_longer_than_any_answer() -> None:
    async with client(**NGRAM, model={"max_model_len": 64}) as (source, http):
        body = {"messages": HELLO, "max_tokens": 4} | content("x" * 1000)
        assert (await http.post(CHAT, json=body)).status_code == 200
        assert source.specs[0].predicted_ids == tuple(b"x" * 64)


@pytest.mark.parametrize("sections", [{}, {"speculative": {"method": "eagle3", "model": "./head"}}])
async def test_who_drafts_otherwise_is_not_told(sections: dict[str, Any]) -> None:
    async with client(**sections) as (source, http):
        answer = await http.post(CHAT, json={"messages": HELLO, "max_tokens": 4} | content("ab"))
        assert source.specs[0].predicted_ids == ()
        assert answer.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no object": ("text", "prediction", "must be an object"),
    "another type": ({"type": "diff", "content": "x"}, "prediction.type", "must be"),
    "no type": ({"content": "x"}, "prediction.type", "is required"),
    "no content": ({"type": "content"}, "prediction.content", "is required"),
    "a number": ({"type": "content", "content": 5}, "prediction.content", "must be a string, or an array"),
    "no parts": ({"type": "content", "content": []}, "prediction.content", "must not be an empty array"),
    "an image": (
        {"type": "content", "content": [{"type": "image_url", "image_url": {}}]},
        "prediction.content",
        "only text parts are supported",
    ),
    "a part without text": ({"type": "content", "content": [{"type": "text"}]}, "prediction.content", "needs a string"),
    "too long": ({"type": "content", "content": "x" * 5001}, "prediction.content", "at most 5000 are allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hi"})])
async def test_refused_by_name(path: str, body: dict[str, Any], name: str) -> None:
    value, param, words = REFUSED[name]
    async with client(**NGRAM, limits={"max_text_chars": 5000}) as (source, http):
        answer = await http.post(path, json=body | {"prediction": value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in error["message"]
        assert not source.generations


async def test_a_beam_search_has_no_drafts() -> None:
    async with client(**NGRAM) as (_, http):
        answer = await http.post(TEXT, json={"prompt": "hi", "use_beam_search": True, "best_of": 2} | content("x"))
        assert answer.json()["error"]["param"] == "prediction"


# -- what usage says ---------------------------------------------------------------------------------------------------


async def test_usage_of_a_whole_answer() -> None:
    async with client((9, 7), (5, 1), **NGRAM) as (_, http):
        body = {"prompt": ["hi", "ho"], "max_tokens": 6} | content("x")
        usage = (await http.post(TEXT, json=body)).json()["usage"]
        assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 6}
        assert usage["completion_tokens"] == 12, "what was guessed is no more than the answer"


async def test_usage_of_a_stream() -> None:
    async with client((9, 7), **NGRAM) as (_, http):
        options = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, done = events_in((await http.post(CHAT, json={"messages": HELLO} | options | content("x"))).content)
        assert done == "[DONE]"
        details = last["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}


async def test_who_predicts_nothing_is_told_nothing() -> None:
    async with client((9, 7), **NGRAM) as (_, http):
        answer = await http.post(CHAT, json={"messages": HELLO, "max_tokens": 6})
        assert "completion_tokens_details" not in answer.json()["usage"]
    async with client((9, 7), **NGRAM) as (_, http):
        answer = await http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 16} | content("x"))
        assert answer.status_code == 200


# -- what attempts tell ------------------------------------------------------------------------------------------------


def test_the_last_word_of_each_attempt_counts() -> None:
    finding = DraftFinding()
    assert (finding.num_accepted, finding.num_rejected) == (0, 0)
    for counts in ((2, 1), (9, 6)):
        finding.tell("a", *counts)
    finding.tell("b", 4, 0)
    assert (finding.num_accepted, finding.num_rejected) == (6, 7)
    finding.tell("b", 4, 9)  # nonsense of a replica
    assert (finding.num_accepted, finding.num_rejected) == (10, 3)


async def test_decode_tells_with_its_tokens() -> None:
    generation = generation_of(max_tokens=8)
    async with running_router(FakeCluster()) as rig:
        rig.cluster.play(Script(drafted=((2, 1), (6, 5))))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert (generation.drafts.num_accepted, generation.drafts.num_rejected) == (5, 1)


async def test_all_attempts_count() -> None:
    generation = generation_of(max_tokens=8)
    async with running_router(FakeCluster(2, 2)) as rig:
        broken = Script(Fault(Phase.DECODE, CallStatus.ERROR, 2), drafted=((2, 1), (6, 5)))
        rig.cluster.play(broken, Script(drafted=((3, 3),)))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 1
        assert (generation.drafts.num_accepted, generation.drafts.num_rejected) == (8, 1)
