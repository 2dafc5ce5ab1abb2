"""200 schemas over HTTP, greedy and sampled, in every layout: what ends is valid, and the same everywhere."""

from __future__ import annotations

import json
import time
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
PARAMS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(0.8, 0, 0.95, 4711)}
# Of one request: a step of four replicas' rows takes long on a machine that others use too.
TIMEOUT_S = 3_000.0
# Those that are also held against transformers, which takes its time.
EVERY = 5
# By way and layout.
ANSWERS: dict[str, dict[str, list[Completed]]] = {way: {} for way in WAYS}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(5_400)]


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, one_server: OneServer) -> RunningServer:
    changes = {"ingress.request_timeout_s": TIMEOUT_S, "ingress.queue_timeout_s": TIMEOUT_S}
    return one_server.get(f"schemas {request.param}", LAYOUTS[request.param], changes)


def asked(schema: dict[str, Any], way: str) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    message = {"role": "user", "content": f"Answer with JSON, by this schema: {json.dumps(schema)[:300]}"}
    body = {"messages": [message], "response_format": form, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    return "/v1/chat/completions", body | WAYS[way]


@pytest.mark.parametrize("way", WAYS)
def test_what_ends_is_valid_and_the_same_in_every_layout(
    server: RunningServer, way: str, request: pytest.FixtureRequest
) -> None:
    layout = request.node.callspec.params["server"]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    requests = [asked(schema, way) for schema in SCHEMAS]
    began_s = time.monotonic()
    answers = [answer for (answer,) in post_all(server, requests, num_at_once=16, timeout_s=TIMEOUT_S)]
    elapsed_s = time.monotonic() - began_s
    num_ended = 0
    for schema, answer in zip(SCHEMAS, answers, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
            num_ended += 1
    print(f"{layout} {way}: {num_ended} of {len(SCHEMAS)} ended by themselves, {elapsed_s:.0f} s", flush=True)
    assert num_ended >= 0.9 * len(SCHEMAS)
    for other, theirs in ANSWERS[way].items():
        unlike = [number for number, pair in enumerate(zip(answers, theirs, strict=True)) if pair[0] != pair[1]]
        assert not unlike, (layout, other, way, unlike)
    ANSWERS[way][layout] = answers
    server.wait_for_baseline()


@pytest.mark.parametrize("way", WAYS)
def test_the_texts_are_those_of_transformers_and_llguidance(way: str) -> None:
    """Of whichever layout has run: they are equal."""
    assert ANSWERS[way], "run it with a layout, of which it takes the answers"
    answers = next(iter(ANSWERS[way].values()))
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = Tokenizer(folder).eos_token_ids
    reference = GrammarReference(model, folder, model.config.vocab_size, ends)
    for number in range(0, len(SCHEMAS), EVERY):
        _, body = asked(SCHEMAS[number], way)
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        schema = json.loads(json.dumps(SCHEMAS[number]))
        with_exact_formats(schema)
        grammar = Grammar(grammar_text.json_schema(schema))
        spec = GenerationSpec(tuple(ids), (0,), MAX_TOKENS, ends, PARAMS[way], grammar=grammar)
        assert reference.is_text(spec, answers[number].token_ids), number
