"""Constrained texts of pools of several engines: an engine that dies takes none with it; 200 schemas are followed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

from cluster.routing.generation import Generation
from cluster.text.tokenizer import Tokenizer
from replicas.grammars import grammar_text
from scheduler.generation_spec import GenerationSpec
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_pools import ManySystem
from tests.engines.local_system import settings
from tests.engines.tiny_model import tiny_settings
from tests.engines.tiny_tokenizer import END_ID, VOCAB_SIZE
from tests.golden.make_schemas import FILE
from tests.model_folder import model_folder

SCHEMAS = json.loads(FILE.read_text())
LISTS = Grammar(
    grammar_text.json_schema(
        {
            "type": "array",
            "items": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
            "minItems": 4,
            "maxItems": 9,
        }
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_dead_decode_engine_takes_no_text_with_it(
    tiny_folder: Path, tiny_reference: GrammarReference, lag: int
) -> None:
    """16 streams in the middle of their objects; those of the dead engine go on elsewhere, as if nothing had been."""
    decodes = [tiny_settings("decode", tiny_folder, lag=lag) for _ in range(2)]
    system = ManySystem(decodes, [tiny_settings("prefill", tiny_folder, lag=lag) for _ in range(2)])
    prompts = [tuple((7 * number + 13 * index) % 500 for index in range(9 + number)) for number in range(16)]
    generations = [
        Generation(
            f"g{number}",
            GenerationSpec(
                prompt, (0,), 60, frozenset({END_ID}), SamplingParams(temperature=number % 3 / 2, seed=number),
                grammar=LISTS,
            ),
            120.0,
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    generated = system.run(generations, kill_after=40)
    assert not system.decodes["decode-0"].engine.thread.is_alive()
    for generation, got in zip(generations, generated, strict=True):
        assert got.token_ids[0] == tiny_reference.text(generation.spec), generation.spec
    system.close()


@pytest.mark.parametrize("grammar", [None, LISTS], ids=["free", "lists"])
@pytest.mark.parametrize(
    "params", [SamplingParams(0.0), SamplingParams(0.9, top_p=0.9, seed=3)], ids=["greedy", "drawn"]
)
def test_the_reference_tells_its_texts_from_others(
    tiny_folder: Path, tiny_reference: GrammarReference, params: SamplingParams, grammar: Grammar | None
) -> None:
    spec = GenerationSpec((5, 77, 130), (0,), 40, frozenset({END_ID}), params, grammar=grammar)
    ids, model = tiny_reference.text(spec), AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    others = [[*ids[:at], (ids[at] + 1) % 500, *ids[at + 1 :]] for at in (0, len(ids) // 2, len(ids) - 1)]
    others += [[], ids[:-1], [*ids, 7]]
    fresh = GrammarReference(model.eval(), tiny_folder, VOCAB_SIZE, {END_ID})
    assert [fresh._comes_next(spec, other, 0) for other in others] == [False] * len(others)
    assert fresh._comes_next(spec, ids, 0)
    assert [fresh.is_text(spec, other) for other in (ids, *others)] == [True] + [False] * len(others)
    assert [fresh.parts_at_near_tie(spec, other) for other in (ids, *others)] == [False] * 7


class Bundled:
    """What the exhaustive tests of the bundled model share."""

    def __init__(self) -> None:
        folder = model_folder()
        self.tokenizer = Tokenizer(folder)
        self.ends = self.tokenizer.eos_token_ids
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.reference = GrammarReference(model, folder, 49_152, self.ends)

    def specs(self, params: SamplingParams) -> list[GenerationSpec]:
        return [
            GenerationSpec(
                tuple(self._prompt(schema)), (0,), 256, self.ends,
                replace(params, seed=params.seed + number), grammar=Grammar(grammar_text.json_schema(schema)),
            )
            for number, schema in enumerate(SCHEMAS)
        ]  # fmt: skip

    def _prompt(self, schema: Any) -> list[int]:
        said = f"Answer with one small JSON value for this schema, nothing else: {json.dumps(schema)[:400]}"
        return self.tokenizer.apply_chat_template([{"role": "user", "content": said}])


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    return Bundled()


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("params", [SamplingParams(0.0), SamplingParams(0.8, seed=1000)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("num_decodes", "num_prefills"), [(1, 0), (1, 1), (2, 2)], ids=["colocated", "1p1d", "2p2d"])
def test_200_schemas_are_followed(
    bundled: Bundled, params: SamplingParams, num_decodes: int, num_prefills: int
) -> None:
    """Equal to transformers' generate, so equal over the layouts; and valid, by a judge of its own."""
    assert len(SCHEMAS) == 200
    began_s = time.monotonic()
    pools = [
        [settings(pool, lag=1) for _ in range(n)] for pool, n in (("decode", num_decodes), ("prefill", num_prefills))
    ]
    system = ManySystem(*pools)
    specs = bundled.specs(params)
    try:
        # No more than a few wait: on a busy machine the last of 200 would wait for longer than requests may.
        generated = system.run([Generation(f"g{n}", spec, 7000.0) for n, spec in enumerate(specs)], num_at_once=24)
    finally:
        system.close()
    print(f"200 texts after {time.monotonic() - began_s:.0f} s", flush=True)
    num_stopped, wrong = 0, []
    for schema, spec, got in zip(SCHEMAS, specs, generated, strict=True):
        ids = got.token_ids[0]
        if not bundled.reference.is_text(spec, ids):
            wrong.append(("other text", schema))
        if got.finish_reasons[0] == "stop":
            num_stopped += 1
            if not Draft202012Validator(schema).is_valid(json.loads(bundled.tokenizer.decode(ids[:-1]))):
                wrong.append(("invalid", schema))
    print(f"{num_stopped} of {len(SCHEMAS)} ended by stop; wrong: {wrong}")
    assert wrong == []
    assert num_stopped >= 180
