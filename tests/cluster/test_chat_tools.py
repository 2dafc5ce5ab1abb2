"""Chats with tools and reasoning over HTTP, whole and streamed; tokens come one by one, markers as single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from cluster.answers.answer_part import PartKind
from cluster.answers.format_table import CALL_ROWS
from cluster.config.limits import LimitsConfig
from cluster.grammars.source_bounds import GrammarBounds
from cluster.http import api_schemas as answers
from cluster.same_names import by_names
from replicas.messages import FinishReason, Token, TokenLogprobs
from tests.cluster.answer_families import PARAMETERS, TEMPLATES, TOOLS, TRANSCRIPTS, Transcript
from tests.cluster.api_client import events_in
from tests.cluster.fake_ingress import (
    EOS,
    LENGTH,
    MODEL,
    STOP,
    ByteCompiler,
    ByteTokenizer,
    FakeIngress,
    ScriptedSource,
    Step,
)

COMPILERS: list[ByteCompiler] = []
CHAT = "/v1/chat/completions"
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
_PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
_TEXTS = "".join(text for row in CALL_ROWS if row.calls is not None for text in row.calls.texts)
_SPECIAL = sorted(set(re.findall(r"<[｜|].*?[｜|]>|\[[A-Z_]+\]", _TEXTS)))


def tokenizer_of(family: str, are_special: bool = True) -> ByteTokenizer:
    """Hermes' and Qwen's tags are ordinary added tokens, the others special ones, as in their tokenizers."""
    return ByteTokenizer(TEMPLATES[family], _SPECIAL, _PLAIN) if are_special else ByteTokenizer(TEMPLATES[family])


def tokens(tokenizer: ByteTokenizer, text: str, end: FinishReason = STOP, choice: int = 0) -> list[Token]:
    """Markers as one token each, bytes otherwise, and the end."""
    pattern = "|".join(map(re.escape, sorted(tokenizer.added_ids, key=len, reverse=True))) or "(?!)"
    ids: list[int] = []
    for piece in re.split(f"({pattern})", text):
        ids += [tokenizer.added_ids[piece]] if piece in tokenizer.added_ids else piece.encode()
    ids += [EOS] if end is STOP else []
    last = len(ids) - 1
    return [Token("", choice, i, id_, end if i == last else None) for i, id_ in enumerate(ids)]


class Client:
    def __init__(self, ingress: FakeIngress, http: httpx.AsyncClient) -> None:
        self.ingress, self.http = ingress, http

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 400} | fields
        return await self.http.post(CHAT, json=body)

    async def whole(self, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """The answer; of a stream the one that its chunks make, as OpenAI's clients put it together."""
        response = await self.post(stream=stream, **fields)
        assert response.status_code == 200, response.text
        if not stream:
            answers.ChatCompletion.model_validate(response.json())
            return dict(response.json())
        *chunks, done = events_in(response.content)
        assert done == "[DONE]"
        return put_together(chunks)


def put_together(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"usage": None}
    for chunk in chunks:
        answers.ChatCompletionChunk.model_validate(chunk)
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"message": {"content": None}, "finish_reason": None})
            assert choice["finish_reason"] is None
            choice["finish_reason"] = part["finish_reason"]
            for name, value in part["delta"].items():
                if name == "tool_calls":
                    add_calls(choice["message"].setdefault("tool_calls", []), value)
                elif value:
                    choice["message"][name] = (choice["message"].get(name) or "") + value
    whole["choices"] = [choices[index] | {"index": index} for index in sorted(choices)]
    return whole


def add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
            assert delta["function"]["name"]
            continue
        assert delta["index"] == len(calls) - 1, "calls come one after the other"
        assert delta.keys() == {"index", "function"}
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


@pytest.fixture(scope="module", autouse=True)
def compilers() -> Iterator[None]:
    """One process for all tests with markers."""
    COMPILERS.append(ByteCompiler(by_names(GrammarBounds, LimitsConfig()), _SPECIAL, _PLAIN))
    yield
    COMPILERS.pop().close()


def ingress_of(tokenizer: ByteTokenizer, source: Any, parser: str = "auto") -> FakeIngress:
    return FakeIngress(source, tokenizer=tokenizer, parser=parser, compiler=COMPILERS[0] if tokenizer.plain else None)


@asynccontextmanager
async def client(
    tokenizer: ByteTokenizer, *script: Step, parser: str = "auto", source: Any = None
) -> AsyncIterator[Client]:
    ingress = ingress_of(tokenizer, source or ScriptedSource(p=script), parser)
    try:
        transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            yield Client(ingress, http)
        assert ingress.num_in_flight == 0
    finally:
        if not tokenizer.plain:
            ingress.compiler.close()


def message_of(transcript: Transcript) -> dict[str, Any]:
    texts = {kind: "".join(part[1] for part in transcript.parts if part[0] == kind) for kind in PartKind.__members__}
    calls = [part for part in transcript.parts if part[0] == "CALL"]
    arguments = [
        "".join(part[1] for part in transcript.parts if part[0] == "ARGUMENTS" and part[2:] == call[2:])
        for call in calls
    ]
    functions = [{"name": call[1], "arguments": text} for call, text in zip(calls, arguments, strict=True)]
    return {"content": texts["CONTENT"] or None, "reasoning": texts["REASONING"] or None, "functions": functions}


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name != "plain"])
async def test_answers_of_each_family(family: str) -> None:
    tokenizer = tokenizer_of(family)
    # A prompt says which, and opens the reasoning where the family's own would.
    of_prompt = {
        f"{index}{'<think>' if transcript.opens_in_prompt else ''}": transcript
        for index, transcript in enumerate(TRANSCRIPTS)
        if transcript.family == family
    }
    script = {
        prompt: tokens(tokenizer, transcript.text, LENGTH if transcript.is_open else STOP)
        for prompt, transcript in of_prompt.items()
    }
    async with client(tokenizer, source=ScriptedSource(**script)) as c:
        for prompt, transcript in of_prompt.items():
            before = calls_counted(c)
            for stream in (False, True):
                answer = await c.whole(stream, tools=TOOLS, messages=[{"role": "user", "content": prompt}])
                check_answer(answer, transcript)
            num_valid, num_malformed = (now - then for now, then in zip(calls_counted(c), before, strict=True))
            assert (num_valid, num_malformed) == (2 * transcript.num_valid, 2 * transcript.num_malformed)


def calls_counted(c: Client) -> list[float]:
    return [c.ingress.samples("splitserve_tool_calls", result=result) for result in ("valid", "malformed")]


def check_answer(answer: dict[str, Any], transcript: Transcript) -> None:
    (choice,) = answer["choices"]
    message, expected = choice["message"], message_of(transcript)
    calls = message.get("tool_calls", [])
    assert message["content"] == expected["content"]
    assert message.get("reasoning_content") == message.get("reasoning") == expected["reasoning"]
    assert [call["function"] for call in calls] == expected["functions"]
    assert len({call["id"] for call in calls}) == len(calls)
    form = r"[A-Za-z0-9]{9}" if transcript.family.startswith("mistral") else r"call_[0-9a-f]{24}"
    assert all(re.fullmatch(form, call["id"]) for call in calls)
    assert choice["finish_reason"] == ("length" if transcript.is_open else "tool_calls" if calls else "stop")


@MODES
async def test_text_is_as_it_was_where_nothing_is_offered(stream: bool) -> None:
    tokenizer = tokenizer_of("hermes")
    text = '<tool_call>{"name": "time", "arguments": {}}</tool_call> \n'
    async with client(tokenizer, *tokens(tokenizer, text)) as c:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = (await c.whole(stream, **fields))["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
            assert c.ingress.tokenizer.rendered[-1][1].tools == []  # type: ignore[union-attr]


@MODES
async def test_a_model_that_writes_its_tags_in_letters(stream: bool) -> None:
    tokenizer = tokenizer_of("hermes", are_special=False)
    async with client(tokenizer, *tokens(tokenizer, '<tool_call>{"name": "time"}</tool_call>')) as c:
        (choice,) = (await c.whole(stream, tools=TOOLS))["choices"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
        assert c.ingress.source.specs[-1].grammar is None  # no token opens a call: it is only read


@MODES
async def test_reasoning_is_counted_and_shown_apart(stream: bool) -> None:
    tokenizer = tokenizer_of("qwen3")
    async with client(tokenizer, *tokens(tokenizer, "<think>\nHmm</think>\n\nHi!")) as c:
        answer = await c.whole(stream, stream_options={"include_usage": True} if stream else None)
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == "Hi!"
        assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hmm"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
        assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("p<think>\n", True), ("p<think>\n\n</think>\n\n", False), ("p", None)]
)
async def test_what_the_prompt_has_opened(prompt: str, is_open: bool | None) -> None:
    tokenizer = tokenizer_of("qwen3")
    script = tokens(tokenizer, "a</think>b")
    source = ScriptedSource(**{prompt: script})
    async with client(tokenizer, source=source) as c:
        messages = [{"role": "user", "content": prompt}]
        (choice,) = (await c.whole(messages=messages, thinking_token_budget=7))["choices"]
        if is_open:
            assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a", "b")
        else:
            assert choice["message"]["content"] == "a</think>b"
        budget = source.specs[0].sampling.thinking
        ids = tokenizer.added_ids
        assert budget is not None
        assert (budget.num_tokens, budget.opener_id, budget.closer_id) == (7, ids["<think>"], ids["</think>"])
        assert budget.is_opened == bool(is_open)


async def test_a_budget_for_a_model_that_does_not_think_is_refused() -> None:
    async with client(tokenizer_of("hermes")) as c:
        response = await c.post(thinking_token_budget=7)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "thinking_token_budget", "unsupported")


@MODES
async def test_with_logprobs_ids_several_choices_and_stop_strings(stream: bool) -> None:
    tokenizer = tokenizer_of("mistral")
    text = 'Ok.[TOOL_CALLS][{"name": "time", "arguments": {}}]'
    script: list[Token] = []
    for choice in range(2):
        scored = tokens(tokenizer, text + ("STOP" if choice else ""), STOP, choice)
        script += [token._replace(logprobs=TokenLogprobs(-1.0, ((token.token_id, -1.0),))) for token in scored]
    async with client(tokenizer, *script) as c:
        fields: dict[str, Any] = {"tools": TOOLS, "n": 2, "logprobs": True, "return_token_ids": True, "stop": ["STOP"]}
        response = await c.post(stream=stream, **fields)
        if not stream:
            for choice in response.json()["choices"]:
                assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
                assert choice["message"]["content"] == "Ok."
                assert choice["finish_reason"] == "tool_calls"
                assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
            return
        *chunks, _ = events_in(response.content)
        for index in range(2):
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
            ids = [id_ for part in parts for id_ in part.get("token_ids") or ()]
            scored_bytes = [
                entry["bytes"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
            ]
            assert ids == [token.token_id for token in script if token.choice == index][: len(ids)]
            assert len(ids) == len(scored_bytes) >= len(tokens(tokenizer, text)) - 1


@MODES
async def test_special_tokens_are_shown_to_whoever_asks_for_them(stream: bool) -> None:
    tokenizer = tokenizer_of("mistral")
    for skip, content in ((True, None), (False, "<eos>")):
        async with client(tokenizer, *tokens(tokenizer, '[TOOL_CALLS][{"name": "time", "arguments": {}}]')) as c:
            (choice,) = (await c.whole(stream, tools=TOOLS, skip_special_tokens=skip))["choices"]
            assert choice["message"]["content"] == content
            assert len(choice["message"]["tool_calls"]) == 1


async def test_a_stop_string_within_a_call_ends_the_answer() -> None:
    tokenizer = tokenizer_of("hermes")
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    async with client(tokenizer, *tokens(tokenizer, text)) as c:
        (choice,) = (await c.whole(tools=TOOLS, stop=["ris"]))["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'
        assert choice["finish_reason"] == "stop"  # not tool_calls: the last one is not complete


async def test_the_config_says_how_answers_are_read() -> None:
    tokenizer = tokenizer_of("hermes")
    text = "<think>Hm</think>[TOOL_CALLS]time[ARGS]{}"
    for parser, content, reasoning, num_calls in (
        ("none", "<think>Hm</think>time{}", None, 0),
        ("think", "time{}", "Hm", 0),
        ("mistral_named", "<think>Hm</think>", None, 1),
    ):
        async with client(tokenizer, *tokens(tokenizer, text), parser=parser) as c:
            (choice,) = (await c.whole(tools=TOOLS))["choices"]
            message = choice["message"]
            assert message["content"] == content
            assert message.get("reasoning") == reasoning
            assert len(message.get("tool_calls", [])) == num_calls


# -- OpenAI's own client ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def openai_client(tokenizer: ByteTokenizer, script: Sequence[Step]) -> AsyncIterator[openai.AsyncOpenAI]:
    ingress = ingress_of(tokenizer, ScriptedSource(p=script))
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0)


async def test_openais_helper_for_streams_gathers_what_the_whole_answer_says() -> None:
    tokenizer = tokenizer_of("qwen3")
    text = (
        '<think>Hm</think>I call.<tool_call>{"name": "weather", "arguments": {"city": "P"}}</tool_call>'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    )
    strict: Any = [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}},
        TOOLS[1],
    ]
    messages: Any = [{"role": "user", "content": "p"}]
    async with openai_client(tokenizer, tokens(tokenizer, text)) as c:
        arguments: dict[int, str] = {}
        async with c.chat.completions.stream(model=MODEL, messages=messages, tools=strict) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.done":
                    arguments[event.index] = event.arguments
            final = await stream.get_final_completion()
        whole = await c.chat.completions.create(model=MODEL, messages=messages, tools=strict)
    for completion in (final, whole):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I call."
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == "Hm"
        functions = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
        assert functions == [("weather", '{"city": "P"}'), ("time", "{}")]
    assert arguments == {0: '{"city": "P"}', 1: "{}"}
    assert json.loads(arguments[0]) == {"city": "P"}
