"""Constrained texts are those of transformers' generate, wherever they are computed and whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate
from transformers import AutoModelForCausalLM

from cluster.routing.generation import Generation
from replicas.grammars import grammar_text
from replicas.settings import EngineSettings
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import GREEDY, Generated, LocalSystem
from tests.engines.tiny_model import save_tiny_model, tiny_settings
from tests.engines.tiny_tokenizer import END_ID, VOCAB_SIZE, save_tiny_tokenizer

LAYOUTS = ["1p1d lag 0", "1p1d lag 1", "colocated lag 0", "colocated lag 1", "two_lanes lag 0", "two_lanes lag 1"]
PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(5 + 11 * number)] for number in range(6)]
ENDS = frozenset({END_ID})
WORD = {"type": "string", "maxLength": 6}
SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"enum": ["red", "green", "blue", 7, None]},
    {"const": {"a": [1, "two", None]}},
    WORD,
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}], "items": False, "minItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": WORD, "b": {"enum": [1, 2]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            }
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 2}]},
    {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 10, "maximum": 12}]},
    {
        "$defs": {"leaf": {"enum": ["l"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "minItems": 1,
        "maxItems": 3,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
        "propertyNames": {"maxLength": 3},
    },
]
GRAMMARS = [Grammar(grammar_text.json_schema(schema, strict=False)) for schema in SCHEMAS]
OTHERS = [
    Grammar(grammar_text.choice(["yes", "no", "perhaps not"])),
    Grammar(grammar_text.regex("[a-f]{3}-[0-9]{2,4}")),
    Grammar(grammar_text.lark('start: pair+\npair: /[a-z]/ "=" /[0-9]/ ";"')),
]
SAMPLED = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=2**63 + 9),
    SamplingParams(temperature=1.3, min_p=0.02, seed=77, presence_penalty=0.5, frequency_penalty=0.3),
]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> GrammarReference:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return GrammarReference(model, folder, VOCAB_SIZE, ENDS)


@contextmanager
def running(decode: EngineSettings, prefill: EngineSettings | None) -> Iterator[LocalSystem]:
    system = LocalSystem(decode, prefill)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def system(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalSystem]:
    changes: dict[str, Any] = {"lag": int(request.param[-1]), "max_batch_tokens": 48}
    if "two_lanes" in request.param:
        changes["layout"] = "two_lanes"
    prefill = tiny_settings("prefill", folder, **changes) if "1p1d" in request.param else None
    with running(tiny_settings("decode", folder, **changes), prefill) as system:
        yield system


def asked(system: LocalSystem, number: int, grammar: Grammar | None, params: SamplingParams, **more: Any) -> Generation:
    prompt = PROMPTS[number % len(PROMPTS)]
    return system.generation(prompt, MAX_TOKENS, params, stop_token_ids=ENDS, grammar=grammar, **more)


def check(reference: GrammarReference, generation: Generation, got: Generated) -> None:
    for choice in generation.spec.choices:
        assert got.token_ids[choice] == reference.text(generation.spec, choice), (generation.spec, choice)


def test_texts_are_those_of_transformers(system: LocalSystem, reference: GrammarReference) -> None:
    """Beside others without a grammar, whose texts stay what they are."""
    grammars = [*GRAMMARS, *OTHERS]
    ways = [GREEDY, *SAMPLED]
    generations = [asked(system, n, grammar, ways[n % len(ways)]) for n, grammar in enumerate(grammars)]
    free = [asked(system, n, None, ways[n % len(ways)]) for n in range(4)]
    (*alone,) = system.run(free)
    generated = system.run([*generations, *free])
    num_stopped = 0
    for generation, got in zip(generations, generated, strict=False):
        check(reference, generation, got)
        if got.finish_reasons[0] == "stop" and generation.spec.grammar in GRAMMARS:
            assert got.token_ids[0][-1] == END_ID
            text = reference.tokenizer.decode_str(got.token_ids[0][:-1])
            validate(json.loads(text), SCHEMAS[GRAMMARS.index(generation.spec.grammar)])
            num_stopped += 1
    assert num_stopped >= 0.9 * len(SCHEMAS)
    assert [got.token_ids for got in generated[len(generations) :]] == [got.token_ids for got in alone]
