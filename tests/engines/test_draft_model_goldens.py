"""The bundled model's goldens with a draft of its own first layers, in one engine and over a handoff: texts hold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.settings import EngineSettings, SpeculationSettings
from tests.engines.drafting_system import CountedDrafts, draft_with
from tests.engines.local_system import LocalSystem, settings
from tests.golden.golden_set import load_goldens
from tests.model_folder import model_folder

NUM_LAYERS = 24  # of 30: right about one time in five


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the same tokenizer."""
    folder = tmp_path_factory.mktemp("first layers")
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    del model.model.layers[NUM_LAYERS:]
    model.config.num_hidden_layers = NUM_LAYERS
    model.save_pretrained(folder)
    for file in Path(model_folder()).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def engine(pool: str, draft: Path) -> EngineSettings:
    made = settings(pool, lag=1, max_running_sequences=16, kv_capacity_tokens=8192)
    made = replace(made, model=replace(made.model, max_model_len=2048))
    return replace(made, speculative=SpeculationSettings("draft_model", str(draft)))


@pytest.fixture(params=[pytest.param("colocated", marks=pytest.mark.exhaustive), "split"])
def system(request: pytest.FixtureRequest, draft: Path) -> Iterator[LocalSystem]:
    system = LocalSystem(engine("decode", draft), engine("prefill", draft) if request.param == "split" else None)
    yield system
    system.close()


def _check(system: LocalSystem, num_drafts: int, every: int) -> None:
    goldens = load_goldens()[::every]
    draft_with(system.decode, num_drafts)
    CountedDrafts.take()
    asked = [system.generation(golden.prompt_ids, len(golden.output_ids), timeout_s=3000.0) for golden in goldens]
    generated = system.run(asked, queue_s=3000.0)
    ties = [golden.check(got.token_ids[0]) for golden, got in zip(goldens, generated, strict=True)]
    num_drafted, num_held = CountedDrafts.take()
    print(f"k {num_drafts}: {num_held} of {num_drafted} held, {len(goldens)} prompts, {sum(map(bool, ties))} near ties")
    assert num_held > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_some_goldens(system: LocalSystem) -> None:
    _check(system, 4, every=37)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_drafts", [2, 4, 7])
def test_every_golden(system: LocalSystem, num_drafts: int) -> None:
    _check(system, num_drafts, every=1)
