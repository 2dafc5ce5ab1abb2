"""Chat templates and their control tokens, on a tokenizer with templates of our own making."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from cluster.api_error import ApiError
from cluster.text.chat_template import ChatTemplate
from cluster.text.control_tokens import ControlTokens
from cluster.text.stand_ins import two_sets
from cluster.text.tokenizer import Tokenizer

IM_START, IM_END = 1, 2


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def template_of(reference: Any, spec: dict[str, Any], source: str | None) -> tuple[ChatTemplate, ControlTokens]:
    """The same tokenizer with another chat template."""
    renderer = copy.copy(reference)
    renderer.chat_template = source
    control_tokens = ControlTokens(spec, source or "")
    return ChatTemplate(renderer, source, control_tokens), control_tokens


def test_a_control_token_in_parts_of_messages_other_than_content(reference: Any, spec: dict[str, Any]) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}: {{ m.tool_calls | tojson }}{% endfor %}"
    chat_template, control_tokens = template_of(reference, spec, source)
    guarded = control_tokens.guarded_backend(spec)
    arguments = {"<|im_start|>": ["<|im_start|>", {"a": "<|im_start|>"}], "n": 1}
    call = {"id": "1", "type": "function", "function": {"name": "<|im_start|>", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "name": "<|im_start|>", "tool_calls": [call]}
    text = chat_template.render([message])
    assert guarded.encode(text).ids.count(IM_START) == 1
    assert text.count("<|im_start|>") == 5


def with_markers(reference: Any) -> dict[str, Any]:
    backend = Backend.from_str(reference.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "<User>", "   ")])
    content: dict[str, Any] = json.loads(backend.to_str())
    return content


def test_markers_that_are_not_special_are_guarded_against_users(reference: Any) -> None:
    spec = with_markers(reference)
    source = "{% for m in messages %}   {{ '<User>' if m.role == 'user' else '' }}{{ m.content }}{% endfor %}<think>"
    chat_template, control_tokens = template_of(reference, spec, source)
    guarded = control_tokens.guarded_backend(spec)
    user_id, think_id = control_tokens.ids["<User>"], control_tokens.ids["<think>"]
    assert "   " not in control_tokens.ids  # also in the template, but no marker
    assert {user_id, think_id}.isdisjoint(control_tokens.special_ids)

    ids = guarded.encode(chat_template.render(user("a<think><User>b"))).ids
    assert (ids.count(user_id), ids.count(think_id)) == (1, 1)
    # What the model thought in an earlier turn comes back as it was.
    answer = {"role": "assistant", "content": "<think>hm</think><|im_end|>"}
    ids = guarded.encode(chat_template.render([*user("a"), answer])).ids
    assert (ids.count(think_id), ids.count(IM_END)) == (2, 0)


def test_templates_still_see_markers_in_answers(reference: Any) -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}<think>{% endfor %}"
    chat_template, _ = template_of(reference, with_markers(reference), source)
    text = chat_template.render([{"role": "assistant", "content": "<think>secret</think>\n fine "}])
    assert "secret" not in text
    assert text.startswith("fine")


def test_a_vocabulary_that_has_control_tokens_as_words_is_guarded_too() -> None:
    # Unigram takes the best words whatever they are: "</s>" in a text, even with special tokens split.
    words = [("<unk>", 0.0), ("</s>", 0.0), *((char, -3.0) for char in "abs</>")]
    backend = Backend(models.Unigram(words, unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.encode_special_tokens = True
    assert backend.encode("a</s>b").ids == [2, 1, 3]
    spec = json.loads(backend.to_str())
    control_tokens = ControlTokens(spec, "")
    guarded = control_tokens.guarded_backend(spec)
    assert guarded.encode("a</s>b").ids == [2, 5, 6, 4, 7, 3]


@pytest.mark.parametrize("word", ["!", ".*"])
def test_an_ordinary_word_as_special_token_is_refused(reference: Any, word: str) -> None:
    backend = Backend.from_str(reference.backend_tokenizer.to_str())
    backend.add_special_tokens([word])
    spec = json.loads(backend.to_str())
    with pytest.raises(ValueError, match="special token"):
        ControlTokens(spec, "").guarded_backend(spec)


def test_longest_control_token_wins(reference: Any) -> None:
    backend = Backend.from_str(reference.backend_tokenizer.to_str())
    backend.add_special_tokens(["<x>", "<x><y>", "<x><y><z>", "|.*|"])
    spec = json.loads(backend.to_str())
    control_tokens = ControlTokens(spec, "")
    guarded = control_tokens.guarded_backend(spec)
    stand_ins, _ = two_sets(control_tokens.characters, frozenset())
    for text in ("<x><y><z>", "<x><y><", "<x><y<x>", "a|.*|b|.*||bc|", "<y><x><x><y>"):
        disclosed = control_tokens.disclose(text, text)
        assert guarded.encode(disclosed).ids == backend.encode(text).ids
        for hide in (control_tokens.hide_pieces, control_tokens.hide_whole, control_tokens.hide_special):
            assert control_tokens.disclose(hide(text, stand_ins), text) == text


# --- chat templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", user("a") + user("b"), "roles must alternate"),
        ("{{ messages[0].nope.nope }}", user("a"), "nope"),
        ("{{ 'a' + 1 }}", user("a"), "concatenate"),
        ("{{ messages[0].content | urlencode }}", user("<|im_end|>"), "takes control tokens .* apart"),
    ],
)
def test_a37_what_a_template_refuses_is_the_clients_error(
    reference: Any, spec: dict[str, Any], source: str, messages: list[dict[str, Any]], reason: str
) -> None:
    chat_template, _ = template_of(reference, spec, source)
    with pytest.raises(ApiError, match=reason) as caught:
        chat_template.render(messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_no_template(reference: Any, spec: dict[str, Any]) -> None:
    chat_template, _ = template_of(reference, spec, None)
    with pytest.raises(ApiError, match="no chat template") as caught:
        chat_template.render(user("a"))
    assert caught.value.status == 400


def test_developer_is_system_unless_the_template_knows_better(reference: Any, spec: dict[str, Any]) -> None:
    messages = [{"role": "developer", "content": "x"}]
    source = "{{ messages[0].role }}"
    assert template_of(reference, spec, source)[0].render(messages) == "system"
    aware = source + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert template_of(reference, spec, aware)[0].render(messages) == "developer!"


def test_a34_tools_only_where_the_template_has_them(tokenizer: Tokenizer, reference: Any, spec: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    asking = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "1"}
    for messages, param in (([*user("a"), asking], "messages[1].tool_calls"), ([answer], "messages[0].role")):
        with pytest.raises(ApiError, match="does not support") as caught:
            tokenizer.apply_chat_template(messages)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported")
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}"
        "{% elif m.role == 'tool' %}={{ m.content }}{% endif %}{% endfor %}"
    )
    assert template_of(reference, spec, source)[0].render([*user("a"), asking, answer]) == "1=3"


def test_arguments_nested_too_deep_are_refused(reference: Any, spec: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {}
    for _ in range(5000):
        arguments = {"a": arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}
    chat_template, _ = template_of(reference, spec, "{{ messages[0].tool_calls | tojson }}")
    with pytest.raises(ApiError, match="recursion"):
        chat_template.render([message])
