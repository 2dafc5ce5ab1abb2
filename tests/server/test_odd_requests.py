"""Valid requests that nobody asks for: odd texts, fields at their edges, and random ones, whose streamed and whole
answers must agree. None may be answered with 5xx, hang, or harm the next one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import API_KEY, CONTEXT
from tests.server.generate import Completed, post, stream
from tests.server.running_server import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STORY = {"prompt": "Once upon a time", "seed": 7, "max_tokens": 12, "return_token_ids": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(api_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=api_server.url, timeout=120, headers=headers) as client:
        yield client
        assert client.post(TEXT, json={"prompt": "The sun is", "max_tokens": 2}).status_code == 200
    api_server.wait_for_baseline()


def both(client: httpx.Client, body: dict[str, Any], path: str = TEXT) -> list[Completed]:
    """All choices, the same whole and streamed."""
    whole = post(client, path, body)
    assert stream(client, path, body) == whole
    return whole


def refused(client: httpx.Client, body: dict[str, Any], path: str = TEXT) -> str:
    """The param of a 400."""
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


# -- several choices -------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_choice_is_the_same_among_fewer_and_more(client: httpx.Client) -> None:
    three = both(client, STORY | {"n": 3})
    assert both(client, STORY) == three[:1]
    assert post(client, TEXT, STORY | {"n": 3, "best_of": 3}) == three
    (best,) = post(client, TEXT, STORY | {"best_of": 3})
    assert best in three


@pytest.mark.exhaustive
def test_a_stop_string_ends_its_own_choice_only(client: httpx.Client) -> None:
    free = post(client, TEXT, STORY | {"n": 4})
    for chosen in free:
        stop = chosen.text[3:7]
        for one, other in zip(free, both(client, STORY | {"n": 4, "stop": stop}), strict=True):
            cut = one.text.find(stop)
            expected = (one.text, one.finish_reason) if cut < 0 else (one.text[:cut], "stop")
            assert (other.text, other.finish_reason) == expected
            assert other.token_ids == one.token_ids[: len(other.token_ids)]


def test_choices_up_to_the_edge_of_the_context(client: httpx.Client) -> None:
    body = {"prompt": [9] * (CONTEXT - 3), "n": 8, "ignore_eos": True, "return_token_ids": True}
    assert [len(choice.token_ids) for choice in post(client, TEXT, body | {"max_tokens": 3})] == [3] * 8
    assert refused(client, body | {"max_tokens": 4}) == "max_tokens"
    assert refused(client, body | {"max_tokens": 4, "use_beam_search": True}) == "max_tokens"
    beams = body | {"n": 2, "best_of": 8, "use_beam_search": True, "max_tokens": 3}
    assert [len(choice.token_ids) for choice in post(client, TEXT, beams)] == [3] * 2


def test_echoes_of_several_prompts(client: httpx.Client) -> None:
    prompts = ["One two", "The sun", "é🌶"]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 2, "temperature": 0, "logprobs": 1}
    plain = post(client, TEXT, {"prompt": prompts, "max_tokens": 2, "temperature": 0, "return_token_ids": True})
    echoed = both(client, body | {"return_token_ids": True})
    assert [choice.text for choice in echoed] == [
        prompt + choice.text for prompt, choice in zip(prompts, plain, strict=True) for _ in range(2)
    ]
    only = client.post(TEXT, json=body | {"max_tokens": 0}).json()
    assert [choice["text"] for choice in only["choices"]] == [prompt for prompt in prompts for _ in range(2)]
    assert only["usage"]["completion_tokens"] == 0


def test_beams_with_all_that_goes_with_them(client: httpx.Client) -> None:
    beams = {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 4, "return_token_ids": True}
    one, other = (post(client, TEXT, beams | {"prompt": prompt}) for prompt in ("The sun is", "One two"))
    assert stream(client, TEXT, beams | {"prompt": ["The sun is", "One two"]}) == one + other
    echoed = post(client, TEXT, beams | {"prompt": "The sun is", "echo": True})
    assert [choice.text for choice in echoed] == [f"The sun is{choice.text}" for choice in one]
    only = post(client, TEXT, beams | {"prompt": "The sun is", "echo": True, "max_tokens": 0})
    assert [(choice.text, choice.token_ids) for choice in only] == [("The sun is", [])] * 2
    stop_id = one[0].token_ids[2]
    stopped = post(client, TEXT, beams | {"prompt": "The sun is", "stop_token_ids": [stop_id]})
    assert all((stop_id in choice.token_ids) == (choice.finish_reason == "stop") for choice in stopped)
    for fields in ({"stop": "a"}, {"logprobs": 1}, {"temperature": 1}, {"min_tokens": 2}, {"best_of": 1}):
        assert refused(client, beams | {"prompt": "x"} | fields) == next(iter(fields))


# -- one field at its edge -------------------------------------------------------------------------


def test_min_tokens_beyond_what_there_can_be(client: httpx.Client) -> None:
    assert refused(client, STORY | {"min_tokens": 13}) == "min_tokens"
    assert refused(client, {"prompt": "x", "min_tokens": 17}) == "min_tokens"  # max_tokens is 16 when left out
    assert refused(client, {"prompt": [9] * (CONTEXT - 1), "min_tokens": 2}) == "min_tokens"
    chat = {"messages": [{"role": "user", "content": "x"}], "min_tokens": CONTEXT}
    assert refused(client, chat, CHAT) == "min_tokens"


def test_biases_of_the_end_token(client: httpx.Client) -> None:
    (end,) = client.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
    body = STORY | {"logit_bias": {str(end): 100}}
    assert both(client, body) == [Completed("", [end], "stop")]
    (longer,) = post(client, TEXT, body | {"min_tokens": 3})
    assert (len(longer.token_ids), longer.token_ids[-1], end in longer.token_ids[:-1]) == (4, end, False)
    (ignored,) = both(client, body | {"ignore_eos": True, "max_tokens": 3})
    assert (ignored.token_ids, ignored.text, ignored.finish_reason) == ([end] * 3, "", "length")
    shown = post(client, TEXT, body | {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 2})
    assert shown[0].text == "<|im_end|>" * 2


@pytest.mark.exhaustive
def test_a_stop_string_of_a_character_that_is_several_tokens(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "a🌶b"}).json()["tokens"]
    assert len(ids) > 3
    for number in range(len(ids)):
        body = {"prompt": ids[: number + 1], "allowed_token_ids": ids[number + 1 :] or ids, "max_tokens": 6, "seed": 1}
        (free,) = both(client, body | {"return_token_ids": True})
        (cut,) = both(client, body | {"return_token_ids": True, "stop": ["🌶", "b"]})
        first = min((free.text.find(stop) for stop in ("🌶", "b") if stop in free.text), default=None)
        assert cut.text == free.text[:first]


def test_of_duplicate_keys_the_last_one_counts(client: httpx.Client) -> None:
    raw = b'{"prompt":"x","max_tokens":1,"prompt":"The sun is","max_tokens":3,"ignore_eos":true}'
    response = client.post(TEXT, content=raw, headers={"content-type": "application/json"})
    count = client.post("/tokenize", json={"prompt": "The sun is"}).json()["count"]
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, 3)


# -- odd texts -------------------------------------------------------------------------------------

ODD_TEXTS = ["\0a", "\u202e", "\ue000", "\ufeff", "\uffff", "🌶", "e\u0301e\u0301", " ", "\n"]
ODD_TEXTS += ["<|im_end|>", "<|im", "{{ 7 * 7 }}{% for %}", "data: [DONE]\n\n"]


def test_odd_prompts(client: httpx.Client) -> None:
    body = {"prompt": ODD_TEXTS, "echo": True, "logprobs": 1, "max_tokens": 1, "return_token_ids": True}
    texts = [choice.text for choice in both(client, body | {"temperature": 0})]
    for text, echoed in zip(ODD_TEXTS, texts, strict=True):
        assert echoed.startswith(text) or "\0" in text  # which this vocabulary lacks
    for text in ODD_TEXTS:
        tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        back = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert back == text or "\0" in text


@pytest.mark.parametrize("text", ODD_TEXTS[::2])
def test_odd_texts_elsewhere(text: str, client: httpx.Client) -> None:
    messages = [{"role": "user", "content": text, "name": text}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": "x", "bad_words": [text], "stop": [text]}),
        (CHAT, {"messages": messages, "chat_template_kwargs": {"x": text, text: "x"}, "user": text}),
        ("/tokenize", {"messages": messages, "return_token_strs": True}),
    ]
    for path, body in bodies:
        response = client.post(path, json=body if path == "/tokenize" else {**body, "max_tokens": 1})
        assert response.status_code in (200, 400), (body, response.text)
        assert isinstance(response.json(), dict)


# -- random requests -------------------------------------------------------------------------------


def _random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One that is valid, or whose fields do not go together."""
    ids = [rng.randrange(49_152) for _ in range(rng.randrange(1, 30))]
    path = rng.choice([CHAT, TEXT])
    body: dict[str, Any] = {"seed": rng.randrange(-(2**63), 2**63), "max_tokens": rng.randrange(1, 9)}
    prompt = rng.choice(["Once upon a time", ids, "🌶 x", "1 2 3 4 5 6", ["a", "b c"]])
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": prompt}
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": rng.randrange(21)}
    choices: list[dict[str, Any]] = [
        {"n": rng.randrange(1, 5)},
        {"temperature": rng.choice([0, 1e-6, 0.1, 1, 2])},
        {"top_p": rng.choice([1e-9, 0.1, 0.9, 1])},
        {"top_k": rng.choice([-1, 0, 1, 50, 2**31 - 1])},
        {"min_p": rng.choice([0, 0.1, 1])},
        {"repetition_penalty": rng.choice([1e-6, 0.5, 1.3, 1e9])},
        {"presence_penalty": rng.choice([-2, 2]), "frequency_penalty": rng.choice([-2, 2])},
        {"logit_bias": {str(rng.randrange(49_152)): rng.choice([-100, 100, 0.5]) for _ in range(rng.randrange(9))}},
        {"bad_words": rng.choice([[" the"], ["a", "e"], ["<|im_end|>"], [","]])},
        {"allowed_token_ids": [rng.randrange(49_152) for _ in range(rng.randrange(1, 50))]},
        {"min_tokens": rng.randrange(1, 9)},
        {"stop": rng.choice(["e", [" a", "\n"], ["the", "th", "h"]]), "include_stop_str_in_output": rng.random() < 0.5},
        {"stop_token_ids": [rng.randrange(100) for _ in range(5)]},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"truncate_prompt_tokens": rng.choice([-1, 1, 7])},
        logprobs if path == CHAT else {"logprobs": rng.randrange(6), "echo": rng.random() < 0.5},
        {"use_beam_search": True, "best_of": 4, "length_penalty": rng.choice([0, 2])},
    ]
    for fields in rng.sample(choices, rng.randrange(6)):
        body |= fields
    return path, body | {"return_token_ids": True}


def _compare(client: httpx.Client, rng: random.Random, num_requests: int) -> None:
    num_compared = 0
    for _ in range(num_requests):
        path, body = _random_request(rng)
        response = client.post(path, json=body)
        assert response.status_code in (200, 400), (body, response.text)
        if response.status_code == 400:
            # The whole answer may be refused when generation is under way; a stream says the same in an event.
            streamed = client.post(path, json={**body, "stream": True})
            assert streamed.status_code == 400 or '"nothing_allowed"' in streamed.text, (body, streamed.text)
            continue
        num_compared += 1
        whole = post(client, path, body)
        assert stream(client, path, body) == whole, body
        assert all(choice.finish_reason in ("stop", "length") for choice in whole)
        assert all(len(choice.token_ids) <= body["max_tokens"] for choice in whole)
    assert num_compared >= num_requests / 4


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, pytest.param(None, id="random")])
def test_streamed_and_whole_answers_agree_on_many(client: httpx.Client, seed: int | None) -> None:
    chosen = random.randrange(2**32) if seed is None else seed
    print("seed", chosen)
    _compare(client, random.Random(chosen), 50)
