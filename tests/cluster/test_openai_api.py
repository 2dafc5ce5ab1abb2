"""Bodies of requests. Names such as a01 are those of faults that other servers had."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from cluster.api_error import ApiError
from cluster.config.limits import LimitsConfig
from cluster.openai.body import parse_body
from cluster.openai.generation_body import GenerationBody
from cluster.openai.request import ChatCompletionBody, CompletionBody
from cluster.openai.unsupported import NEUTRAL_VALUES

LIMITS = LimitsConfig()
HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionBody:
    return parse_body(orjson.dumps({"messages": HELLO} | fields), "application/json", ChatCompletionBody, LIMITS)


def completion(**fields: Any) -> CompletionBody:
    return parse_body(orjson.dumps({"prompt": "hi"} | fields), "application/json", CompletionBody, LIMITS)


def refusal(raw: bytes, model_class: type[GenerationBody] = ChatCompletionBody) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(raw, "application/json", model_class, LIMITS)
    assert caught.value.message
    assert caught.value.type == "invalid_request_error"
    return caught.value


def refused_field(param: str | None, **fields: Any) -> str:
    """Both endpoints refuse these fields and name the one at fault; with the same message."""
    messages = set()
    for model_class, body in ((ChatCompletionBody, {"messages": HELLO}), (CompletionBody, {"prompt": "hi"})):
        error = refusal(json.dumps(body | fields).encode(), model_class)
        assert (error.status, error.param) == (400, param)
        messages.add(error.message)
    assert len(messages) == 1
    message: str = messages.pop()
    assert message.startswith(param or "")
    return message


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"7",
        b'{"a":1}x',
        b"\xef\xbb\xbf{}",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\xbd"}]}',
        rb'{"messages":[{"role":"user","content":"emoji \ud83d"}]}',
        rb'{"messages":[{"role":"user","content":"\udcf0"}]}',
        rb'{"\ud83d":1}',
        b'{"temperature":NaN,"messages":[]}',
        b'{"temperature":-Infinity,"messages":[]}',
        b'{"temperature":1e400,"messages":[]}',
        b'{"x":' * 30_000,
        b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a11_a31_what_is_no_json_object(raw: bytes) -> None:
    for model_class in (ChatCompletionBody, CompletionBody):
        error = refusal(raw, model_class)
        assert (error.status, error.code) == (400, "invalid_json")
        assert len(error.message) < 200


def test_a31_a32_any_valid_unicode_passes() -> None:
    raw = rb'{"messages":[{"role":"user","content":"\ud83d\ude00 a\u0000b \u202e \n\n data: x"}]}'
    body = parse_body(raw, None, ChatCompletionBody, LIMITS)
    assert body.messages[0].content == "😀 a\0b \u202e \n\n data: x"


def test_of_duplicate_keys_the_last_counts() -> None:
    assert parse_body(b'{"prompt":"a","n":3,"n":2}', None, CompletionBody, LIMITS).n == 2


@pytest.mark.parametrize("content_type", [None, "", "application/json", "Application/JSON ; Charset=UTF-8"])
def test_a46_accepted_content_types(content_type: str | None) -> None:
    assert parse_body(b'{"prompt":"a"}', content_type, CompletionBody, LIMITS).prompt == ["a"]
    assert parse_body(b'{"prompt":"a"}', 'application/json; charset="utf-8"', CompletionBody, LIMITS)


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "json", ";"],
)
def test_a46_other_content_types(content_type: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(b'{"prompt":"a"}', content_type, CompletionBody, LIMITS)
    assert caught.value.status == 415


def test_g04_too_many_bytes() -> None:
    with pytest.raises(ApiError, match=str(LIMITS.max_body_bytes)) as caught:
        parse_body(b"x" * (LIMITS.max_body_bytes + 1), None, CompletionBody, LIMITS)
    assert caught.value.status == 413


def test_messages_of_errors_quote_nothing_the_client_sent() -> None:
    secret = "s3cr3t"
    for fields in (
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"temperature": secret},
        {"stop": [{"x": secret}]},
        {"response_format": {"type": secret}},
        {"best_of": secret, "n": 2},
        {"logit_bias": {secret: 1}},
        {"bad_words": [{"x": secret}]},
    ):
        error = refusal(json.dumps({"messages": HELLO} | fields).encode())
        assert secret not in error.message
        assert error.__cause__ is None
        assert error.__suppress_context__ or error.__context__ is None


# --- fields --------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    for body in (chat(), completion()):
        assert (body.model, body.n, body.max_new_tokens, body.seed) == (None, 1, None, None)
        assert (body.temperature, body.top_p, body.top_k) == (1.0, 1.0, 0)
        assert (body.stop, body.stop_token_ids, body.ignore_eos, body.stream) == ([], [], False, False)
        assert (body.include_usage, body.include_stop_str_in_output, body.unknown_fields) == (False, False, [])


def test_a01_null_is_the_default_for_every_optional_field() -> None:
    names = GenerationBody.model_fields.keys() | NEUTRAL_VALUES.keys()
    nulls: dict[str, Any] = dict.fromkeys(names)
    assert len(nulls) > 50
    chat_nulls: dict[str, Any] = dict.fromkeys(ChatCompletionBody.model_fields.keys() - {"messages"})
    completion_nulls: dict[str, Any] = dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt"})
    assert chat(**nulls | chat_nulls) == chat()
    assert completion(**nulls | completion_nulls) == completion()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n", 8, 8),
        ("n", 2.0, 2),
        ("max_tokens", 5.0, 5),
        ("max_tokens", 10**15, 10**15),
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("temperature", 1e-45, 1e-45),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 40.0, 40),
        ("seed", 0, 0),
        ("seed", -1, -1),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", -(2**63), -(2**63)),
        ("stop", "a", ["a"]),
        ("stop", ["a", "\n", "c", "d"], ["a", "\n", "c", "d"]),
        ("stop", [], []),
        ("stop_token_ids", [1, 2.0], [1, 2]),
        ("ignore_eos", True, True),
        ("include_stop_str_in_output", True, True),
        ("stream", True, True),
        ("model", "m", "m"),
        ("min_p", 1, 1.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1e9, 1e9),
        ("repetition_penalty", 1e-6, 1e-6),
        ("logit_bias", {"0": -100, "42": 0.5}, {0: -100.0, 42: 0.5}),
        ("logit_bias", {}, {}),
        ("bad_words", ["a", " b"], ["a", " b"]),
        ("allowed_token_ids", [1, 2.0], [1, 2]),
        ("min_tokens", 5, 5),
        ("best_of", 1, 1),
        ("prompt_logprobs", 20, 20),
        ("truncate_prompt_tokens", -1, -1),
        ("skip_special_tokens", False, False),
        ("return_tokens_as_token_ids", True, True),
    ],
)
def test_accepted_values(name: str, value: Any, expected: Any) -> None:
    for body in (chat(**{name: value}), completion(**{name: value})):
        got = getattr(body, name)
        assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (5.5, True, "5", [5], {}, 1e30)),
        *(("max_completion_tokens", value) for value in (0, 5.5, False, "5")),
        *(("n", value) for value in (0, -1, 1.5, True, "1", 9, 10**9, 10**30)),
        *(("temperature", value) for value in (-0.1, 2.1, 1e6, "0", True, [1])),
        *(("top_p", value) for value in (0, 0.0, -1, 1.1, "1", True)),
        *(("top_k", value) for value in (-2, 1.5, "1", True, 2**31)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 2**64, 1e30, 1.5, "7", True)),
        *(("stop", value) for value in ("", [""], ["a", ""], [None], [1], 1, True, {}, ["a"] * 5, "x" * 257)),
        *(("stop_token_ids", value) for value in (1, "1", ["1"], [True], [1.5], [None], [1] * 129)),
        *(("stream", value) for value in ("yes", "true", 1, 0)),
        *(("ignore_eos", value) for value in ("yes", 1)),
        ("model", 5),
        ("stream_options", True),
        *(("min_p", value) for value in (-0.1, 1.1, "0", True)),
        *(("presence_penalty", value) for value in (2.1, -2.1, False, "0")),
        *(("frequency_penalty", value) for value in (2.1, -2.1, [0])),
        *(("repetition_penalty", value) for value in (0, -1, 1e-7, 1.1e9, True, "1")),
        *(("logit_bias", value) for value in ({"abc": 1}, {"-1": 1}, {"1.0": 1}, {"01": 1}, {"5": 101}, {"5": -101})),
        *(("logit_bias", value) for value in ([], 1, {"5": True}, {"5": None}, {"5": "1"}, {str(10**10): 1})),
        ("logit_bias", {str(i): 1 for i in range(301)}),
        *(("bad_words", value) for value in ("a", [""], [" "], [1], [None], ["x" * 257], ["a"] * 65)),
        *(("allowed_token_ids", value) for value in ([], [True], ["1"], 1, [1] * 1025)),
        *(("min_tokens", value) for value in (-1, 1.5, True, "1")),
        *(("best_of", value) for value in (0, 9, True, "1", 1.5)),
        *(("prompt_logprobs", value) for value in (-1, 21, True, "1")),
        *(("truncate_prompt_tokens", value) for value in (0, -2, 1.5, True)),
        *(("use_beam_search", value) for value in (1, "true")),
    ],
)
def test_a02_a23_a25_a26_a28_c05_refused_values(name: str, value: Any) -> None:
    refused_field(name, **{name: value})


def test_more_fields_than_any_api_has_are_refused() -> None:
    error = refusal(json.dumps({f"field{i}": 1 for i in range(257)}).encode())
    assert (error.status, error.code) == (400, "invalid_value")
    assert "257 fields" in error.message


def test_a26_a_huge_n_is_refused_at_once() -> None:
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()  # not the clock's: other tests run beside this one
        assert "at most 8" in refused_field("n", n=1_000_000_000)
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 0.05


def test_a07_max_completion_tokens_goes_first() -> None:
    for build in (chat, completion):
        assert build(max_completion_tokens=3).max_new_tokens == 3
        assert build(max_tokens=4).max_new_tokens == 4
        assert build(max_tokens=4, max_completion_tokens=3).max_new_tokens == 3
        assert build(max_tokens=4, max_completion_tokens=None).max_new_tokens == 4


def test_b17_stream_options() -> None:
    for build in (chat, completion):
        assert build(stream=True, stream_options={"include_usage": True}).include_usage
        assert build(stream=True, stream_options={"include_usage": False, "x": 1}).include_usage is False
        assert build(stream=True, stream_options={"include_usage": None}).include_usage is False
        assert build(stream=True, stream_options={}).include_usage is False
        assert build(stream=True, stream_options=None).include_usage is False
        assert build(stream=False, stream_options=None).include_usage is False
    assert "stream" in refused_field("stream_options", stream_options={"include_usage": True})
    refused_field("stream_options", stream=False, stream_options={})
    refused_field("stream_options.include_usage", stream=True, stream_options={"include_usage": 1})


def test_a29_unknown_fields_are_ignored_and_can_be_logged() -> None:
    message = {"role": "user", "content": "hi", "name": "bob", "id": 7, "x": {"y": []}}
    body = chat(messages=[message], foo=1, user="u", metadata={"a": [1]}, store=True, best_of=1)
    assert body.unknown_fields == ["foo"]
    assert body.template_messages() == [{"role": "user", "content": "hi", "name": "bob"}]
    many = completion(**{f"{i:03}" + "x" * 1000: 1 for i in range(100)}).unknown_fields
    assert len(many) == 10
    assert max(map(len, many)) == 64


# --- fields that depend on the endpoint or on each other -------------------------------------------------------------


@pytest.mark.parametrize("value", [1_000_000, -1, 21, True, "1", 1.5])
def test_a17_top_logprobs(value: Any) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": value}
    assert refusal(json.dumps(body).encode()).param == "top_logprobs"


def test_logprobs_have_the_type_of_their_endpoint() -> None:
    assert [chat(logprobs=True, top_logprobs=k).num_logprobs for k in (0, 20)] == [0, 20]
    assert [completion(logprobs=k).num_logprobs for k in (0, 5)] == [0, 5]
    assert (chat(logprobs=False).num_logprobs, completion().num_logprobs) == (None, None)
    for value in (True, False, -1, 6, "1"):
        assert refusal(json.dumps({"prompt": "hi", "logprobs": value}).encode(), CompletionBody).param == "logprobs"
    for value in (0, 5, "true"):
        assert refusal(json.dumps({"messages": HELLO, "logprobs": value}).encode()).param == "logprobs"


def test_echo_asks_for_the_prompts_logprobs_too() -> None:
    assert completion(echo=True).num_prompt_logprobs is None
    assert completion(logprobs=2).num_prompt_logprobs is None
    assert completion(echo=True, logprobs=2).num_prompt_logprobs == 2
    assert completion(echo=True, logprobs=2, prompt_logprobs=5).num_prompt_logprobs == 5
    assert chat(prompt_logprobs=0).num_prompt_logprobs == 0
    assert completion(max_tokens=0, echo=True).max_new_tokens == 0


CHAT, TEXT = (ChatCompletionBody, {"messages": HELLO}), (CompletionBody, {"prompt": "hi"})


@pytest.mark.parametrize(
    ("endpoints", "fields", "param"),
    [
        ([CHAT, TEXT], {"max_tokens": 0}, "max_tokens"),
        ([CHAT, TEXT], {"max_tokens": -1}, "max_tokens"),
        ([CHAT, TEXT], {"max_tokens": -5, "stream": True}, "max_tokens"),
        ([TEXT], {"max_tokens": 0, "echo": False}, "max_tokens"),
        ([CHAT], {"max_tokens": 0, "echo": True}, "echo"),
        ([CHAT], {"top_logprobs": 1}, "top_logprobs"),
        ([CHAT], {"best_of": 2}, "best_of"),
        ([CHAT, TEXT], {"best_of": 2, "n": 3}, "best_of"),
        ([TEXT], {"best_of": 2, "stream": True}, "best_of"),
        ([CHAT, TEXT], {"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ([CHAT, TEXT], {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ([CHAT], {"continue_final_message": True}, "continue_final_message"),
        ([CHAT, TEXT], {"length_penalty": 2}, "length_penalty"),
        ([CHAT, TEXT], {"early_stopping": True}, "early_stopping"),
        *(
            ([CHAT, TEXT], {"use_beam_search": True, name: value}, name)
            for name, value in {
                "temperature": 1,
                "top_p": 0.5,
                "top_k": 5,
                "min_p": 0.5,
                "presence_penalty": 1,
                "repetition_penalty": 2,
                "logit_bias": {"1": 1},
                "bad_words": ["a"],
                "allowed_token_ids": [1],
                "min_tokens": 1,
                "stop": "a",
                "prompt_logprobs": 1,
                "early_stopping": "always",
            }.items()
        ),
        ([TEXT], {"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ([CHAT], {"use_beam_search": True, "logprobs": True}, "logprobs"),
    ],
)
def test_what_does_not_go_together(endpoints: list[Any], fields: dict[str, Any], param: str) -> None:
    for model_class, body in endpoints:
        error = refusal(json.dumps(body | fields).encode(), model_class)
        assert (error.status, error.param) == (400, param)
        assert error.message.startswith(param)


def test_fields_of_the_other_endpoint_are_refused_where_they_would_be_ignored() -> None:
    for (model_class, body), name, neutral, asking in [
        (CHAT, "echo", False, True),
        (TEXT, "top_logprobs", 0, 5),
        (TEXT, "continue_final_message", False, True),
        (TEXT, "chat_template_kwargs", {}, {"x": 1}),
    ]:
        error = refusal(json.dumps(body | {name: asking}).encode(), model_class)
        assert (error.code, error.param) == ("unsupported", name)
        assert parse_body(json.dumps(body | {name: neutral}).encode(), None, model_class, LIMITS).unknown_fields == []


def test_what_goes_together() -> None:
    for build in (chat, completion):
        beams = build(use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping="never", temperature=0)
        assert (beams.n, beams.num_generated_choices, beams.early_stopping) == (2, 4, "never")
        assert build(use_beam_search=True, n=2, stream=True).num_generated_choices == 2
        assert build(n=2, best_of=2).num_generated_choices == 2
        assert build(min_tokens=2, max_tokens=2)
    assert completion(best_of=3).num_generated_choices == 3
    assert chat(continue_final_message=True, add_generation_prompt=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).continuous_usage
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


# --- unsupported fields --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("guided_whitespace_pattern", "[ ]"),
        ("ec_transfer_params", {"a": {"b": [1]}}),
        ("kv_transfer_params", 1),
        ("chat_template", "{{ 1 }}"),
    ],
)
def test_a43_unsupported_fields_are_refused_by_name(name: str, value: Any) -> None:
    assert "not supported" in refused_field(name, **{name: value})
    assert refusal(json.dumps({"messages": HELLO, name: value}).encode()).code == "unsupported"


def test_neutral_values_of_unsupported_fields_pass() -> None:
    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            assert chat(**{name: value}).unknown_fields == []
            assert completion(**{name: value}).unknown_fields == []
    assert 'may only be "none" or "auto"' in refused_field("function_call", function_call={"name": "f"})


def test_older_names_of_tools_are_refused_with_the_newer_ones() -> None:
    assert refused_field("functions", functions=[{"name": "f"}]).endswith("; use tools")
    assert refused_field("function_call", function_call={"name": "f"}).endswith("; use tool_choice")


def test_completions_have_no_tools() -> None:
    for name, value in (("tools", [{}]), ("tool_choice", "required"), ("thinking_token_budget", 5)):
        error = refusal(json.dumps({"prompt": "hi", name: value}).encode(), CompletionBody)
        assert (error.param, error.code) == (name, "unsupported")
    assert completion(tools=[], tool_choice="auto").unknown_fields == []


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([1], "messages[0]"),
        ([*HELLO, None], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "alien", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([*HELLO, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://::1/"}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": "x", "name": 7}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (HELLO * 2049, "messages"),
        ([1] * 500_000, "messages[0]"),
    ],
)
def test_a10_refused_messages(messages: Any, param: str) -> None:
    began_s = time.thread_time()  # of work, not of a machine that stands still
    error = refusal(json.dumps({"messages": messages}).encode())
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param)
    assert time.thread_time() - began_s < 1


def test_missing_messages_and_prompt() -> None:
    assert refusal(b"{}").message == "messages is required"
    assert refusal(b"{}", CompletionBody).message == "prompt is required"


def test_a35_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "", "x": 1}, {"type": "text", "text": "b"}]
    history = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}, *HELLO]
    assert [m["content"] for m in chat(messages=history).template_messages()] == ["a\n\nb", "a", "hi"]


def test_a34_tool_calls_come_without_content() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    for empty in ({"content": None}, {}, {"content": ""}):
        asking = {"role": "assistant", "tool_calls": [call]} | empty
        answer = {"role": "tool", "tool_call_id": "c1", "content": "3"}
        messages = chat(messages=[*HELLO, asking, answer]).template_messages()
        function = {"name": "f", "arguments": {"x": [1]}}
        calls = [{"id": "c1", "type": "function", "function": function}]
        assert messages[1:] == [{"role": "assistant", "content": "", "tool_calls": calls}, answer]
    without = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert chat(messages=[without]).messages[0].tool_calls[0].function.arguments == {}
    assert chat(messages=[{"role": "assistant", "tool_calls": None}]).template_messages()[0].keys() == {
        "role",
        "content",
    }


def test_every_role() -> None:
    roles = ["system", "developer", "user", "assistant", "tool"]
    assert [m.role for m in chat(messages=[{"role": r, "content": "x"} for r in roles]).messages] == roles


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([1.0], [[1]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([5279552648203111001], [[5279552648203111001]]),  # the tokenizer refuses it: it knows the vocabulary
        (["x"] * 32, ["x"] * 32),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        [[1], []],
        5,
        True,
        {},
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        [True],
        [1.5],
        [None],
        [["a"]],
        [[[1]]],
        ["x"] * 33,
    ],
)
def test_a16_refused_prompts(prompt: Any) -> None:
    error = refusal(json.dumps({"prompt": prompt}).encode(), CompletionBody)
    assert (error.status, error.param) == (400, "prompt")


def test_long_prompts_of_ids_are_validated_quickly() -> None:
    raw = json.dumps({"prompt": [7] * LIMITS.max_text_chars}).encode()
    started = time.process_time()
    assert len(parse_body(raw, None, CompletionBody, LIMITS).prompt[0]) == LIMITS.max_text_chars
    assert time.process_time() - started < 0.5
    floats = json.dumps({"prompt": [7, 8.0, 9]}).encode()
    assert parse_body(floats, None, CompletionBody, LIMITS).prompt == [[7, 8, 9]]
