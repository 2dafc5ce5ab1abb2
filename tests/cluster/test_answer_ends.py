"""Where answers end, by the files of a checkpoint: held against transformers' own generate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from cluster.text.tokenizer import Tokenizer
from replicas.answer_ends import answer_ends

NUM_IDS = 16
PAD = NUM_IDS - 1  # never chosen, so what follows it is no part of an answer
CONFIG, GENERATION = "config.json", "generation_config.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chooses about evenly among few tokens, so that a batch of answers meets all of them."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_IDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / GENERATION).unlink()
    return folder


def with_files(checkpoint: Path, folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> str:
    """The checkpoint with these keys in its config.json, null being a value, and with this generation_config.json."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    own = json.loads((checkpoint / CONFIG).read_text())
    del own["eos_token_id"]
    (folder / CONFIG).write_text(json.dumps(own | config))
    if generation is not None:
        (folder / GENERATION).write_text(json.dumps(generation))
    return str(folder)


def ends_of_generate(folder: str) -> set[int]:
    """The tokens at which answers of transformers ended, seen on answers; all others went on."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    prompts = torch.full((96, 1), 1)
    texts = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=24,
        pad_token_id=PAD,
        bad_words_ids=[[PAD]],
    )[:, 1:].tolist()
    ended = [text[: text.index(PAD)] for text in texts if PAD in text]
    ends, others = {text[-1] for text in ended}, {id_ for text in ended for id_ in text[:-1]}
    assert ends.isdisjoint(others)
    assert ended or {id_ for text in texts for id_ in text} == set(range(PAD))
    return ends


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, set[int]]] = {
    "a list in config.json": ({"eos_token_id": [0, 2, 7]}, None, {0, 2, 7}),
    "one in config.json": ({"eos_token_id": 5}, None, {5}),
    "none anywhere, though the class has one by default": ({}, None, set()),
    "null": ({"eos_token_id": None}, None, set()),
    "generation_config.json goes before": ({"eos_token_id": 5}, {"eos_token_id": [3, 4]}, {3, 4}),
    "generation_config.json that names none": ({"eos_token_id": 5}, {"temperature": 0.5, "do_sample": True}, set()),
    "generation_config.json with null": ({"eos_token_id": 5}, {"eos_token_id": None}, set()),
    "generation_config.json made from config.json": ({"eos_token_id": 5}, {"_from_model_config": True}, set()),
    "an empty list": ({"eos_token_id": 5}, {"eos_token_id": []}, set()),
    "some that the model does not have": ({}, {"eos_token_id": [-1, 6, 500]}, {6}),
}


@pytest.mark.parametrize(("config", "generation", "expected"), CASES.values(), ids=CASES.keys())
def test_ends_are_those_of_generate(
    checkpoint: Path, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    folder = with_files(checkpoint, tmp_path, config, generation)
    assert ends_of_generate(folder) == expected
    assert {id_ for id_ in answer_ends(folder) if 0 <= id_ < NUM_IDS} == expected


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"eos_token_id": [1, 106]}},
        {"text_config": {"eos_token_id": 9}, "eos_token_id": None},
        {"text_config": {"eos_token_id": 9}, "eos_token_id": 7},
        {"decoder": {"eos_token_id": 8}, "text_config": {"eos_token_id": 9}},
        {"decoder": {"hidden_size": 8}, "text_config": {"eos_token_id": 9}},
        {"decoder": None, "generator": {}, "text_config": {"eos_token_id": 9}},
        {"text_config": None},
    ],
)
def test_ends_of_a_config_of_several_models(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(config))
    reference: Any = GenerationConfig.from_pretrained(tmp_path, config_file_name=CONFIG, _from_model_config=True)
    ids = reference.eos_token_id
    assert list(answer_ends(str(tmp_path))) == (ids if isinstance(ids, list) else [] if ids is None else [ids])


@pytest.mark.parametrize("file", [CONFIG, GENERATION])
@pytest.mark.parametrize("value", ["</s>", 2.5, True, [None], [2, "x"], {"id": 2}])
def test_what_is_no_token_id_is_refused_by_name(tmp_path: Path, file: str, value: Any) -> None:
    (tmp_path / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=f"^{file} of the model: eos_token_id must be"):
        answer_ends(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / GENERATION).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{GENERATION} of the model is no"):
        answer_ends(str(tmp_path))


def test_no_files_no_ends_and_infinity_is_let_pass(tmp_path: Path) -> None:
    assert answer_ends(str(tmp_path)) == ()
    (tmp_path / CONFIG).write_text('{"time_step_limit": [0.0, Infinity], "eos_token_id": 3}')
    assert answer_ends(str(tmp_path)) == (3,)


def test_ends_of_a_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Its own end comes on top; ids that only the model has are ends; ids that not even it has are none."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    config = {"model_type": "llama", "vocab_size": 49_200, "eos_token_id": [0, 77, 49_199, 49_200, -1]}
    (folder / CONFIG).write_text(json.dumps(config))
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == {0, 2, 77, 49_199}
    (folder / GENERATION).write_text("{}")
    assert Tokenizer(str(folder)).eos_token_ids == {2}
