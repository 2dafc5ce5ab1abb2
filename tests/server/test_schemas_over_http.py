"""200 schemas over HTTP, greedy and sampled, in every layout: what ends is valid, and the same everywhere."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.grammars.exact_formats import with_exact_formats
from cluster.text.tokenizer import Tokenizer
from replicas.grammars import grammar_text
from scheduler.generation_spec import GenerationSpec
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams
from tests.engines.grammar_reference import GrammarReference
from tests.golden.make_schemas import FILE
from tests.model_folder import model_folder
from tests.server.conftest import OneServer
from tests.server.generate import Completed, post_all
from tests.server.running_server import RunningServer

SCHEMAS: list[dict[str, Any]] = json.loads(FILE.read_text())
LAYOUTS = {"1p1d": "local.yaml", "2p2d": "local-2p2d.yaml", "colocated": "colocated.yaml"}
MAX_TOKENS = 256
WAYS = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 4711}}
# Those that are also computed by transformers' generate, which takes its time.
EVERY = 10
BY_LAYOUT: dict[str, dict[str, list[Completed]]] = {}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(5_400)]


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, one_server: OneServer) -> RunningServer:
    return one_server.get(request.param, LAYOUTS[request.param])


def asked(schema: dict[str, Any], way: str) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    message = {"role": "user", "content": f"Answer with JSON, by this schema: {json.dumps(schema)[:300]}"}
    body = {"messages": [message], "response_format": form, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    return "/v1/chat/completions", body | WAYS[way]


def test_what_ends_is_valid_and_the_same_in_every_layout(server: RunningServer, request: pytest.FixtureRequest) -> None:
    layout = request.node.callspec.params["server"]
    BY_LAYOUT[layout] = {}
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for way in WAYS:
        answers = [answer for (answer,) in post_all(server, [asked(schema, way) for schema in SCHEMAS], num_at_once=16)]
        num_ended = 0
        for schema, answer in zip(SCHEMAS, answers, strict=True):
            if answer.finish_reason == "stop":
                jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
                num_ended += 1
        print(f"{layout} {way}: {num_ended} of {len(SCHEMAS)} ended by themselves")
        assert num_ended >= 0.9 * len(SCHEMAS)
        BY_LAYOUT[layout][way] = answers
        for other in BY_LAYOUT.values():
            unlike = [n for n, pair in enumerate(zip(answers, other[way], strict=True)) if pair[0] != pair[1]]
            assert not unlike, (layout, way, unlike)
    server.wait_for_baseline()


def test_the_texts_are_those_of_transformers_and_llguidance() -> None:
    """Whichever layout has run last: they are equal."""
    answers = next(reversed(BY_LAYOUT.values()))
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = Tokenizer(folder).eos_token_ids
    reference = GrammarReference(model, folder, model.config.vocab_size, ends)
    for way, params in (("greedy", SamplingParams(temperature=0.0)), ("sampled", SamplingParams(0.8, 0, 0.95, 4711))):
        for number in range(0, len(SCHEMAS), EVERY):
            _, body = asked(SCHEMAS[number], way)
            ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
            schema = json.loads(json.dumps(SCHEMAS[number]))
            with_exact_formats(schema)
            grammar = Grammar(grammar_text.json_schema(schema))
            spec = GenerationSpec(tuple(ids), (0,), MAX_TOKENS, ends, params, grammar=grammar)
            assert reference.is_text(spec, answers[way][number].token_ids), (way, number)
