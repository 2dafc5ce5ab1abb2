"""Engines with a draft model: every text is the one without, and drafts were right."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.model_support import UnsupportedModel
from replicas.serving import device_runner
from replicas.serving.engine_builder import build_engine
from replicas.settings import EngineSettings, SpeculationSettings
from replicas.speculation.draft_loading import refuse_other_tokenizer
from scheduler.admission import AdmissionPolicy
from scheduler.constant_drafts import ConstantDrafts
from scheduler.length_estimator import LengthEstimator
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem
from tests.engines.tiny_model import save_tiny_model, tiny_settings
from tests.engines.tiny_tokenizer import DONE, save_tiny_tokenizer

PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(9 + 17 * number)] for number in range(4)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, frequency_penalty=0.3)


def save_near(folder: Path, near: Path) -> None:
    """Other weights by a little: a draft that is mostly right."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(near)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the served model, and of its draft."""
    folder, near = (tmp_path_factory.mktemp(name) for name in ("tiny", "near"))
    save_tiny_model(folder)
    save_near(folder, near)
    return folder, near


def with_drafts(pool: str, folders: tuple[Path, Path], num_drafts: int, **changes: Any) -> EngineSettings:
    return tiny_settings(pool, folders[0], speculative=speculative(folders, num_drafts), **changes)


def speculative(folders: tuple[Path, Path], num_drafts: int = 2) -> SpeculationSettings:
    return SpeculationSettings("draft_model", str(folders[1]), max_drafts=num_drafts)


def run(system: LocalSystem) -> list[Generated]:
    """Greedy and sampled, alone and with three choices, all at once."""
    return system.run(
        [system.generation(prompt, 40, GREEDY) for prompt in PROMPTS]
        + [system.generation(prompt, 40, SAMPLED, num_choices=3) for prompt in PROMPTS[:2]]
    )


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time it takes."""
    monkeypatch.setattr(device_runner, "Speculator", lambda policy: ConstantDrafts(policy.max_drafts))


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Iterator[list[Generated]]:
    system = LocalSystem(tiny_settings("decode", folders[0]), None)
    yield run(system)
    system.close()


def assert_same(ours: list[Generated], theirs: list[Generated]) -> None:
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert [one.finish_reasons for one in ours] == [one.finish_reasons for one in theirs]


def tokens_a_row(system: LocalSystem) -> float:
    """Above 1 only if drafts held."""
    engine = system.decode.engine
    return engine.scheduler.batch.num_forwarded_tokens / engine.steps.num_rows


@pytest.mark.parametrize(("num_drafts", "lag", "is_split"), [(2, 1, True), (4, 0, False), (7, 1, True)])
def test_texts_are_those_without(
    folders: tuple[Path, Path], plain: list[Generated], num_drafts: int, lag: int, is_split: bool
) -> None:
    """Prompts that come from a prefill engine, or are computed beside the rows."""
    prefill = with_drafts("prefill", folders, num_drafts) if is_split else None
    system = LocalSystem(with_drafts("decode", folders, num_drafts, lag=lag), prefill)
    try:
        assert_same(run(system), plain)
        assert tokens_a_row(system) > 1.2
        asyncio.run(system.wait_for_baseline())
    finally:
        system.close()


def test_requests_that_give_way(folders: tuple[Path, Path], plain: list[Generated]) -> None:
    """Who comes back from host memory has drafts again, and the text that it would have had."""
    settings = with_drafts(
        "decode", folders, 4, lag=1, kv_capacity_tokens=512, host_memory_bytes=1 << 26,
        admission=AdmissionPolicy(quantile=0.05, min_samples=1),
    )  # fmt: skip
    system = LocalSystem(settings, None)
    estimator = system.decode.engine.scheduler.budget.estimator
    assert isinstance(estimator, LengthEstimator)
    for _ in range(100):  # outputs were very short so far
        estimator.observe(4)
    try:
        assert_same(run(system), plain)
        assert system.decode.engine.scheduler.preemption.num_swapped > 0
        assert tokens_a_row(system) > 1
    finally:
        system.close()


def test_memory_is_for_both(folders: tuple[Path, Path]) -> None:
    """Of so many bytes each block takes the draft model's part, too."""
    plain = tiny_settings("decode", folders[0], kv_capacity_tokens=None, kv_memory_bytes=4_000_000)
    blocks, names = [], []
    for settings in (plain, replace(plain, speculative=speculative(folders))):
        system = LocalSystem(settings, None)
        blocks.append(system.decode.engine.scheduler.limits.num_blocks)
        names.append(system.decode.peer.fingerprint)
        system.close()
    assert blocks[0] == 2 * blocks[1], "both models have layers of one shape, and as many"
    assert names[0] == names[1], "who drafts is nobody else's business"


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_folder_that_has_gone_since_the_config_was_checked(
    folders: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    """Or a part of it: the replica says which key's, and what is missing."""

    def refusal() -> str:
        settings = tiny_settings("decode", folders[0], speculative=SpeculationSettings(method, str(tmp_path / "draft")))
        with pytest.raises(UnsupportedModel) as refused:
            build_engine(settings, "decode-0")
        return str(refused.value)

    assert refusal().startswith(f"speculative.model: {tmp_path / 'draft'} is not there any more")
    (tmp_path / "draft").mkdir()
    assert refusal().startswith(f"speculative.model: {tmp_path / 'draft'} has no config.json any more")
    shutil.copy(folders[0] / "config.json", tmp_path / "draft")
    said = refusal()
    assert said.startswith(f"speculative.model: {tmp_path / 'draft'} ")
    assert "model.safetensors" in said or method == "eagle3"


def test_another_tokenizer_is_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever differs is named; the same tokens in a file of another form do not differ."""
    served, draft = tmp_path / "served", tmp_path / "draft"
    for source, folder in zip(folders, (served, draft), strict=True):
        shutil.copytree(source, folder)
    refuse_other_tokenizer(str(draft), str(served))
    save_tiny_tokenizer(served)
    with pytest.raises(UnsupportedModel, match=r"speculative.model: .*draft has no tokenizer"):
        build_engine(with_drafts("decode", (served, draft), 2), "decode-0")
    save_tiny_tokenizer(draft)
    said = json.loads((draft / "tokenizer.json").read_text())

    def write() -> None:
        (draft / "tokenizer.json").write_text(json.dumps(said, indent=3))

    write()
    refuse_other_tokenizer(str(draft), str(served))
    vocabulary = said["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    write()
    with pytest.raises(
        UnsupportedModel, match=r"another tokenizer .*: 'A' is \d+ and not \d+, 'B' is \d+ and not \d+;"
    ):
        refuse_other_tokenizer(str(draft), str(served))
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    next(token for token in said["added_tokens"] if token["content"] == DONE)["special"] = False
    write()
    with pytest.raises(UnsupportedModel, match="tokens 2 are special in one of them only"):
        refuse_other_tokenizer(str(draft), str(served))
