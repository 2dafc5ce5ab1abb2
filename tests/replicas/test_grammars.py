"""Grammars: what their texts describe, what is refused and why, and what is kept of those that were compiled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from replicas.grammars import grammar_cache, grammar_text
from replicas.grammars.choice_texts import ChoiceTexts
from replicas.grammars.compiled_grammar import CompiledGrammar, GrammarRefused, compile_grammar
from replicas.grammars.control_tokens import control_ids, with_ids_of_controls, without_control_texts
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.joined_patterns import num_joined_patterns
from scheduler.grammar import Grammar
from tests.model_folder import model_folder

PATIENCE_S = 120.0
VOCAB_SIZE = 49_152
EOS, IM_END = 0, 2


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return grammar_tokenizer(model_folder(), VOCAB_SIZE, (EOS, IM_END))


@pytest.fixture(scope="module")
def accepts(tokenizer: LLTokenizer) -> Callable[[str, str], bool]:
    def whole_text(grammar: str, text: str) -> bool:
        matcher = compile_grammar(tokenizer, grammar, GrammarFuel()).start()
        ids = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whole_text


def allowed(matcher: LLMatcher) -> list[int]:
    words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(words, bitorder="little").nonzero()[0].tolist()  # type: ignore[no-any-return]


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            grammar_text.json_schema(POINT),
            ['{"x":1}', '{ "x": 1 }', '{\n    "x": 1\n}'],
            ["{}", '{"x":1}}', '{   "x":1}'],
        ),
        (grammar_text.any_json_object(), ["{}", '{"a":[1,{"b":null}]}'], ["[1]", "1", '{"a":}']),
        (grammar_text.json_schema(True), ["1", "[]", '"a"'], ["a", ""]),
        (grammar_text.regex(r"a/b\d{2}"), ["a/b12"], ["a/b1", "xa/b12"]),
        (
            grammar_text.choice(["yes", 'n"o\n\\', "ü\u2028/\x7f\x01/", "a\tb"]),
            ["yes", 'n"o\n\\', "ü\u2028/\x7f\x01/", "a\tb"],
            ["y", "no"],
        ),
        (grammar_text.lark('start: "a"+ "b"'), ["aab"], ["b", "aa"]),
        (grammar_text.lark('start: "<" %json {"type": "integer"} ">"'), ["<12>"], ["<a>"]),
    ],
)
def test_a_text_describes_what_its_source_did(
    accepts: Callable[[str, str], bool], grammar: str, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 100, VOCAB_SIZE, VOCAB_SIZE + 77])
def test_every_end_and_no_unknown_token_is_allowed(vocab_size: int) -> None:
    """The logits may be more than the tokenizer knows, or fewer."""
    tokenizer = grammar_tokenizer(model_folder(), vocab_size, (EOS, IM_END, VOCAB_SIZE + 5, -1))
    matcher = compile_grammar(tokenizer, grammar_text.regex("(?s).*"), GrammarFuel()).start()
    ids = allowed(matcher)
    assert {EOS, IM_END} < set(ids)
    assert len(ids) > 40_000
    assert max(ids) < VOCAB_SIZE
    assert matcher.consume_token(IM_END)
    assert allowed(matcher) == [EOS, IM_END]


def test_a_model_without_ends_has_no_grammars(tmp_path: Path) -> None:
    for file in Path(model_folder()).glob("*token*.json"):
        said = json.loads(file.read_text())
        said.pop("eos_token", None)
        (tmp_path / file.name).write_text(json.dumps(said))
    shutil.copy(Path(model_folder()) / "config.json", tmp_path)
    with pytest.raises(ValueError, match="no token that ends"):
        grammar_tokenizer(str(tmp_path), VOCAB_SIZE, (VOCAB_SIZE,))


def test_the_tokenizers_own_end_is_one_too() -> None:
    assert grammar_tokenizer(model_folder(), VOCAB_SIZE, ()).eos_tokens == [IM_END]


OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (grammar_text.lark("start: foo"), 'unknown name: "foo"'),
        (grammar_text.regex("("), "unclosed group"),
        (grammar_text.regex("(?=a)b"), "look-around"),
        (grammar_text.json_schema({"type": "string", "format": "foo"}), "Unknown format: foo"),
        (grammar_text.json_schema({"type": "string", "format": "foo", "x-guidance": {"lenient": True}}), "format: foo"),
        (grammar_text.json_schema({"not": {"type": "string"}}), "not"),
        (grammar_text.json_schema(False), "not"),
        (grammar_text.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "exclude each other"),
        # It is built within its limits, and exceeds them when it is used.
        (grammar_text.json_schema(OPTIONAL), "row has 12007 items"),
        (grammar_text.json_schema({"allOf": [{"pattern": f"a.*{i}"} for i in range(60)]}), "60 regular expressions"),
        (grammar_text.lark("start: T\nT: " + " & ".join(f"/.*a.*{i}/" for i in range(60))), "60 regular expressions"),
        ("{}", "grammars"),
        ("[" * 100_000, "expecting"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(tokenizer: LLTokenizer, grammar: str, reason: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        compile_grammar(tokenizer, grammar, GrammarFuel())
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_special_token_may_be_what_must_come(accepts: Callable[[str, str], bool]) -> None:
    assert accepts(grammar_text.lark('start: "a" <[1]> "b"'), "ab") is False
    assert accepts(grammar_text.lark("start: <[1]>"), "") is False


CONTROL = "<|im_end|>"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (grammar_text.json_schema({"enum": [f"x{CONTROL}y", "<|im_start|>"]}), f'"x{CONTROL}y"'),
        (grammar_text.json_schema({**POINT, "properties": {CONTROL: {"const": 1}}, "required": [CONTROL]}), None),
        (grammar_text.choice([CONTROL, f"{CONTROL}<repo_name>"]), f"{CONTROL}<repo_name>"),
        (grammar_text.regex(r"<\|im_end\|>"), CONTROL),
        (grammar_text.lark(f'start: "{CONTROL}"'), CONTROL),
    ],
)
def test_what_is_spelt_like_a_control_token_is_none(tokenizer: LLTokenizer, grammar: str, text: str | None) -> None:
    """At each place of the text its next token may come, and no control token may but at its end."""
    matcher = compile_grammar(tokenizer, grammar, GrammarFuel()).start()
    for token_id in tokenizer.tokenize_str(f'{{"{CONTROL}":1}}' if text is None else text):
        ids = allowed(matcher)
        assert token_id in ids
        assert not any(map(tokenizer.is_special_token, ids))
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()
    assert allowed(matcher) == [EOS, IM_END]


def test_control_tokens_keep_their_ids_under_other_names() -> None:
    plain = AutoTokenizer.from_pretrained(model_folder()).backend_tokenizer.to_str()
    ids = control_ids(plain)
    assert ids[CONTROL] == IM_END
    renamed = control_ids(without_control_texts(plain))
    assert sorted(renamed.values()) == sorted(ids.values())
    assert not renamed.keys() & ids.keys()
    lark = f'start: "<|im_end|>" {CONTROL} /a{CONTROL}/ <other> <[1]> // {CONTROL}'
    assert with_ids_of_controls(lark, ids) == f'start: "<|im_end|>" <[2]> /a{CONTROL}/ <other> <[1]> // {CONTROL}'
    of_two_lines = "start: /a\n<|im_end|>/ <|im_end|>"
    assert with_ids_of_controls(of_two_lines, ids) == "start: /a\n<|im_end|>/ <[2]>"


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_vocabularies_of_any_form_are_renamed(kind: str) -> None:
    words = ["<unk>", "a", "b"]
    vocab: Any = [[word, 0.0] for word in words] if kind == "Unigram" else {w: i for i, w in enumerate(words)}
    model = {"type": kind, "vocab": vocab} | ({"unk_id": 0} if kind == "Unigram" else {"unk_token": "<unk>"})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 0, "content": "<unk>", "special": True, **flags}]
    renamed = without_control_texts(json.dumps({"added_tokens": added, "model": model, "post_processor": None}))
    assert "<unk>" not in renamed
    assert list(control_ids(renamed).values()) == [0]
    loaded = Tokenizer.from_str(renamed)
    assert loaded.get_vocab_size() == 3
    assert loaded.token_to_id(next(iter(control_ids(renamed)))) == 0


def test_not_strict_leaves_out_what_is_unknown(accepts: Callable[[str, str], bool]) -> None:
    assert accepts(grammar_text.json_schema({"type": "string", "format": "foo"}, strict=False), '"x"')
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert accepts(grammar_text.json_schema(overlapping, strict=False), "1")


def test_one_of_is_taken_where_its_parts_exclude_each_other(accepts: Callable[[str, str], bool]) -> None:
    parts = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]
    grammar = grammar_text.json_schema({"oneOf": parts})
    assert accepts(grammar, '{"k":"b"}')
    assert not accepts(grammar, '{"k":"c"}')


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"type": "string"}, 0),
        ({"pattern": "a", "format": "date", "maxLength": 3}, 3),
        ({"properties": {str(i): {"pattern": "a"} for i in range(30)}}, 1),
        ({"anyOf": [{"pattern": "a"}] * 30}, 1),
        ({"allOf": [{"properties": {"k": {"pattern": str(i)}}} for i in range(9)]}, 9),
        ({"pattern": "a", "allOf": [{"pattern": "b"}, {"anyOf": [{"pattern": "c"}, {"pattern": "d"}]}]}, 3),
        (
            {
                "$defs": {"a": {"allOf": [{"pattern": "1"}, {"$ref": "#/$defs/b"}]}, "b": {"pattern": "2"}},
                "$ref": "#/$defs/a",
            },
            2,
        ),
        ({"properties": {"next": {"$ref": "#"}, "name": {"pattern": "a"}}}, 1),
        ({"enum": [{"pattern": "a"}]}, 0),
    ],
)
def test_patterns_that_one_string_must_match_are_counted(schema: dict[str, Any], count: int) -> None:
    assert num_joined_patterns(grammar_text.json_schema(schema)) == count
    embedded = "start: %json " + json.dumps(schema)
    assert num_joined_patterns(embedded) == max(count, 1)


def test_joined_patterns_of_lark_are_those_outside_of_literals() -> None:
    assert num_joined_patterns('start: "a & b" T // & c\nT: /x&&/ & /y/ & ~/z/') == 3
    # A regular expression may have several lines: no string begins within it.
    assert num_joined_patterns('start: T\nT: /a\n"/ & /b/ & /c/ & /"/') == 4
    assert num_joined_patterns("start: T\nT: /a\n&&/ & /b/") == 2


def cache_of(tokenizer: LLTokenizer, **bounds: int) -> GrammarCache:
    return GrammarCache(
        tokenizer,
        GrammarFuel(),
        **{"num_threads": 1, "max_entries": 3, "max_bytes": 1 << 26} | bounds,  # type: ignore[arg-type]
    )


def test_a_text_is_compiled_once_while_it_is_kept(tokenizer: LLTokenizer) -> None:
    cache = cache_of(tokenizer)
    texts = [grammar_text.choice([name]) for name in "abcd"]
    first = cache.get(texts[0])
    assert isinstance(first.result(PATIENCE_S), CompiledGrammar)
    assert cache.get(texts[0]) is first
    for text in texts[1:3]:
        cache.get(text)
    assert cache.get(texts[0]) is first
    cache.get(texts[3])  # texts[1] is the one that nobody has asked for the longest time
    assert cache.get(texts[0]) is first
    assert (cache.counts.hits, cache.counts.misses) == (3, 4)
    assert cache.get(texts[1]).result(PATIENCE_S)
    assert cache.counts.misses == 5
    cache.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_grammar_that_many_follow_has_twins(tokenizer: LLTokenizer, num_threads: int) -> None:
    """As many as threads at most; also of those who all wait for it to be compiled."""
    cache = cache_of(tokenizer, num_threads=num_threads)
    grammar = Grammar(grammar_text.any_json_object())
    compiled = cache.get(grammar.text).result(PATIENCE_S)
    assert compiled.num_twins == 1
    begun = [cache.begin(grammar, ()).result(PATIENCE_S).of(0) for _ in range(40)]
    cache._threads.shutdown(wait=True)
    assert compiled.num_twins == num_threads
    assert {text.twin for text in begun} <= set(range(num_threads))
    after = ChoiceTexts(grammar, compiled, ())
    assert {after.of(choice).twin for choice in range(num_threads)} == set(range(num_threads))


def test_twins_allow_what_the_first_does(tokenizer: LLTokenizer) -> None:
    compiled = compile_grammar(tokenizer, grammar_text.any_json_object(), GrammarFuel())
    compiled.add_twin()
    assert compiled.num_twins == 2
    masks = []
    for matcher in (compiled.start(0), compiled.start(1)):
        assert matcher.consume_tokens(tokenizer.tokenize_str('{"a b":[1, tr'))
        masks.append(allowed(matcher))
    assert masks[0] == masks[1]
    assert 0 < len(masks[0]) < 100


def test_texts_begin_where_a_replays_prompt_ends(tokenizer: LLTokenizer) -> None:
    cache = cache_of(tokenizer)
    grammar = Grammar(grammar_text.choice(["abcdef"]))
    ids = tokenizer.tokenize_str("abcdef")
    anew, replayed = cache.begin(grammar, ()), cache.begin(grammar, ids[:-1])
    texts = [texts.result(PATIENCE_S).of(0).matcher for texts in (anew, replayed)]
    assert texts[0] is not None
    assert texts[1] is not None
    assert ids[-1] in allowed(texts[1])
    assert ids[-1] not in allowed(texts[0])
    assert isinstance(cache.begin(Grammar("start: foo"), ids).exception(30), GrammarRefused)
    assert isinstance(cache.begin(Grammar("start: foo"), ()).exception(30), GrammarRefused)
    cache.close()


def test_what_fails_for_another_reason_is_tried_again(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> CompiledGrammar:
        raise MemoryError("not now")

    cache = cache_of(tokenizer)
    text = grammar_text.choice(["a"])
    with monkeypatch.context() as patched:
        patched.setattr(grammar_cache, "compile_grammar", failing)
        assert isinstance(cache.get(text).exception(30), MemoryError)
    assert cache.get(text).result(PATIENCE_S)
    cache.close()


def test_large_texts_push_out_small_ones(tokenizer: LLTokenizer) -> None:
    cache = cache_of(tokenizer, max_bytes=5_000_000)
    small = cache.get(grammar_text.choice(["a"]))
    large = cache.get(grammar_text.choice(["b" * 20_000]))
    assert large.result(PATIENCE_S)
    assert cache.get(grammar_text.choice(["b" * 20_000])) is large
    assert cache.get(grammar_text.choice(["a"])) is not small
    assert small.result(PATIENCE_S)
    cache.close()


def test_a_refusal_is_kept_too(tokenizer: LLTokenizer) -> None:
    cache = cache_of(tokenizer)
    refused = cache.get("start: foo")
    with pytest.raises(GrammarRefused, match="foo"):
        refused.result(PATIENCE_S)
    assert cache.get("start: foo") is refused
    assert cache.counts.refused == 1
    assert cache.counts.compile_s > 0.0
    cache.close()


def test_whoever_makes_and_compiles_texts_needs_no_torch() -> None:
    """The ingress does both."""
    code = (
        "import sys\n"
        "import replicas.grammars.grammar_cache, replicas.grammars.grammar_text, replicas.grammars.grammar_tokenizer\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
