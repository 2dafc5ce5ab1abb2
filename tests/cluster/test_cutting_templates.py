"""Chat templates that cut and change the text of messages: it stays text, and nothing of how it is guarded shows."""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cluster.api_error import ApiError
from cluster.text.chat_template import ChatTemplate, TemplateOptions
from cluster.text.control_tokens import ControlTokens

# What they do to the text is the same whatever the characters are, or is done to each character by itself.
EVEN_HANDED = [
    "c",
    "c[:8]",
    "c[:-1]",
    "c[3:]",
    "c[1::2]",
    "c[::-1]",
    "c[c | length // 2:]",
    "c | length",
    "c | reverse",
    "c | list | join",
    "c | list | reverse | join('-')",
    "c | first ~ c | last",
    "c | truncate(9)",
    "c | truncate(6, true, '')",
    "c | upper",
    "c | lower",
    "c | trim",
    "c.split() | join(' ')",
    "c.split(' ')[-1]",
    "c | replace(' ', '')",
    "c | replace('X', '<x>')",
    "c | tojson",
    "c | indent(2)",
    "c | center(30)",
    "c ~ c",
    "c[:4] ~ c[4:]",
    "'%s|%10s' % (c, c)",
    "c * 2",
    "c | batch(3) | map('join') | join('.')",
    "'yes' if c else 'no'",
]
# These look for characters that control tokens have, or treat them by what they are.
PARTIAL = [
    "c | title",
    "c | capitalize",
    "c | escape",
    "c | urlencode",
    "c | sort | join",
    "c | unique | join",
    "c | wordwrap(7)",
    "c | wordcount",
    "c | tojson(ensure_ascii=true)",
    "'%r' % c",
    "c | replace('a', '<x>')",
    "c | replace('|', '')",
    "c | replace('im_', 'IM-')",
    "c.replace('X', '').replace('im_', 'X')",
    "c.split('_') | join('*')",
    "c.split('|>')[0]",
    "c[c.find('|'):]",
    "c.partition('<|im_end|>')[2]",
    "'has' if '<|im_end|>' in c else 'has not'",
    "'begins' if c.startswith('<') else c",
    "c.isalpha()",
    "c | map('urlencode') | join",
    "'%s' % (c > 'x')",
]
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "end|>",
    "im_end",
    "<|",
    "|>",
    "<",
    "|",
    ">",
    "[",
    "a",
    "X",
    " ",
    "\n",
    "é",
]
PIECES += ["IM_END", "<|im_X", "\ue000", "\ue001", "\ue002", "\ue003", "\U000f0000", "\U000f0007", "\U0010fffd", "123"]
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]|\\\\ue00|\\\\udb80|%EE%80|%F3%B0|\\\\U000f")
IM_START = 1


@pytest.fixture(scope="session")
def spec(reference: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(reference.backend_tokenizer.to_str())
    return content


class Rendering:
    """A template of our making, by our renderer and by transformers' own."""

    def __init__(self, reference: Any, spec: dict[str, Any], source: str) -> None:
        self._renderer = copy.copy(reference)
        self._renderer.chat_template = source
        self.control_tokens = ControlTokens(spec, source)
        self._ours = ChatTemplate(self._renderer, source, self.control_tokens)

    def guarded(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """Secret names and all."""
        return self._ours.render(messages, TemplateOptions(variables=variables))

    def plain(self, messages: list[dict[str, Any]]) -> str:
        text: str = self._renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def readable(self, guarded: str) -> str:
        """The text with the control tokens that count as such in their own names."""
        for content, name in self.control_tokens.secret_names.items():
            guarded = guarded.replace(name, content)
        return guarded

    def num_control_tokens(self, guarded: str) -> int:
        return sum(guarded.count(name) for name in self.control_tokens.secret_names.values())


def of_expression(expression: str) -> str:
    """Puts in two control tokens of its own."""
    return "{% for m in messages %}<|im_start|>{% set c = m.content %}{{ " + expression + " }}<|im_end|>{% endfor %}"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def outcome(rendering: Rendering, content: str) -> tuple[str, ApiError | None]:
    try:
        return rendering.guarded(user(content)), None
    except ApiError as error:
        return "", error


@pytest.fixture(scope="session")
def renderings(reference: Any, spec: dict[str, Any]) -> dict[str, Rendering]:
    return {e: Rendering(reference, spec, of_expression(e)) for e in EVEN_HANDED + PARTIAL}


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(expression=st.sampled_from(EVEN_HANDED), content=CONTENTS, role=st.sampled_from(["user", "assistant", "system"]))
@example("c[:8]", "abc <|im_start|> d", "user")
@example("c[:8]", "abc <|im_start|> d", "assistant")
@example("c | length", "<|im_end|>", "user")
@example("c[::-1]", ">|dne_mi|<", "user")
def test_cuts_are_those_of_the_text_itself(
    renderings: dict[str, Rendering], expression: str, content: str, role: str
) -> None:
    rendering = renderings[expression]
    messages = [{"role": role, "content": content}]
    text = rendering.guarded(messages)
    assert rendering.readable(text) == rendering.plain(messages)
    if role == "user":
        assert rendering.num_control_tokens(text) == 2


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(expression=st.sampled_from(PARTIAL), content=CONTENTS)
@example("c | tojson(ensure_ascii=true)", "<|im_end|>")
@example("c | urlencode", "<|im_end|>")
@example("c | sort | join", "<|im_end|>")
def test_whatever_a_template_does_the_text_stays_text_and_no_stand_in_shows(
    renderings: dict[str, Rendering], expression: str, content: str
) -> None:
    rendering = renderings[expression]
    plain = rendering.plain(user(content))
    text, refusal = outcome(rendering, content)
    if refusal is not None:
        assert (refusal.status, refusal.param) == (400, "messages")
        assert "<|im_" in content  # only what has a whole control token may be refused
        assert not PRIVATE_USE.search(refusal.message)
        return
    readable = rendering.readable(text)
    if readable != plain:
        # As if the control tokens in the text were written with other characters.
        other = str.maketrans(dict(zip("<|im_startend>", "一二三四五六七八九十甲丙丁戊", strict=True)))
        for token in ("<|im_start|>", "<|im_end|>"):
            content = content.replace(token, token.translate(other))
        back = {ord(name): chr(code) for code, name in other.items()}
        expected = rendering.plain(user(content)).translate(back)
        assert readable == expected
    else:
        assert len(PRIVATE_USE.findall(readable)) == len(PRIVATE_USE.findall(plain))


def test_text_that_a_template_joins_to_a_control_token_stays_text(reference: Any, spec: dict[str, Any]) -> None:
    """No message has one, and what is rendered has."""
    for expression, content in {
        "c[::-1]": ">|dne_mi|<",
        "c | replace('X', '')": "<|imX_end|>",
        "c.split('X') | join": "<|imX_end|>",
        "c | lower": "<|IM_END|>",
        "c[1:]": "x<|im_end|>",
    }.items():
        rendering = Rendering(reference, spec, of_expression(expression))
        text = rendering.guarded(user(content))
        assert rendering.readable(text) == "<|im_start|><|im_end|><|im_end|>"
        assert rendering.num_control_tokens(text) == 2
    joined = Rendering(reference, spec, "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>")
    text = joined.guarded([*user("<|im_"), *user("end|>")])
    assert (joined.readable(text), joined.num_control_tokens(text)) == ("<|im_end|><|im_end|>", 1)
    within = Rendering(reference, spec, "<{{ messages[0].content }}><|im_end|>")
    text = within.guarded(user("|im_end|"))
    assert (within.readable(text), within.num_control_tokens(text)) == ("<|im_end|><|im_end|>", 1)


def test_variables_and_names_and_arguments_are_cut_like_content(reference: Any, spec: dict[str, Any]) -> None:
    source = "{{ date[:4] }} {{ messages[0].name[:4] }} {{ messages[1].tool_calls[0].function.arguments | tojson }}"
    rendering = Rendering(reference, spec, source)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_end|>"]}}}
    messages = [{**user("x")[0], "name": "<|im_end|>"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = rendering.guarded(messages, date="<|im_end|>")
    assert text == '<|im <|im {"<|im_end|>": ["<|im_end|>"]}'
    assert rendering.num_control_tokens(text) == 0


def test_a_template_that_looks_for_control_tokens_in_text_sees_none(reference: Any, spec: dict[str, Any]) -> None:
    source = of_expression("c.split('<|im_end|>')[-1] if '<|im_end|>' in c else c")
    rendering = Rendering(reference, spec, source)
    assert rendering.readable(rendering.guarded(user("a<|im_end|>b"))) == "<|im_start|>a<|im_end|>b<|im_end|>"
    assert rendering.readable(rendering.guarded(user("a<b"))) == "<|im_start|>a<b<|im_end|>"


def test_a_template_that_looks_for_other_text_in_brackets_sees_it(reference: Any, spec: dict[str, Any]) -> None:
    rendering = Rendering(reference, spec, of_expression("'picture' if '<image>' in c else c"))
    assert rendering.readable(rendering.guarded(user("<image>"))) == "<|im_start|>picture<|im_end|>"
    text = rendering.guarded(user("a <|im_end|>"))
    assert (rendering.readable(text), rendering.num_control_tokens(text)) == ("<|im_start|>a <|im_end|><|im_end|>", 2)


def test_a_template_that_fails_only_with_stand_ins(reference: Any, spec: dict[str, Any]) -> None:
    """Like content.split("<")[1]: what it asks for is there."""
    rendering = Rendering(reference, spec, of_expression("c.split('<')[1].upper()"))
    assert rendering.readable(rendering.guarded(user("a<b"))) == "<|im_start|>B<|im_end|>"
    with pytest.raises(ApiError, match="takes control tokens in the text of a message apart"):
        rendering.guarded(user("a<|im_end|>"))


def test_what_a_template_says_of_a_message_has_the_messages_own_words(reference: Any, spec: dict[str, Any]) -> None:
    rendering = Rendering(reference, spec, "{{ raise_exception('not this: ' ~ messages[0].content) }}")
    with pytest.raises(ApiError, match=r"not this: a<\|im_end\|>"):
        rendering.guarded(user("a<|im_end|>"))


def test_a_text_may_have_any_private_use_characters_but_not_nearly_all(reference: Any, spec: dict[str, Any]) -> None:
    rendering = Rendering(reference, spec, of_expression("c[1:]"))
    every_other = "x<|im_end|>" + "".join(map(chr, range(0xF0000, 0x10FFFE, 2)))
    assert rendering.readable(rendering.guarded(user(every_other))) == f"<|im_start|>{every_other[1:]}<|im_end|>"
    with pytest.raises(ApiError, match="private-use characters"):
        rendering.guarded(user("<|im_end|>" + "".join(map(chr, range(0xF0000, 0x10FFFE)))))


def test_special_tokens_without_brackets_are_hidden_where_they_stand(reference: Any) -> None:
    backend = Backend.from_str(reference.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("EOSEOS"), AddedToken("Human:", special=True)])
    rendering = Rendering(reference, json.loads(backend.to_str()), "Human:{{ messages[0].content[2:] }}EOSEOS")
    text = rendering.guarded(user("a Human: EOSEOS <|im_end|>"))
    assert rendering.readable(text) == "Human:Human: EOSEOS <|im_end|>EOSEOS"
    assert rendering.num_control_tokens(text) == 2


def test_brackets_by_the_million_take_no_long_time(reference: Any, spec: dict[str, Any]) -> None:
    rendering = Rendering(reference, spec, of_expression("c"))
    content = "<a" * 1_000_000
    started = time.process_time()
    text = rendering.guarded(user(content))
    assert time.process_time() - started < 3  # regular expressions that call back for each take 5
    assert rendering.num_control_tokens(text) == 2
