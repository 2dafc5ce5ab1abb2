"""What is loaded is whole and is what its config says: else it is refused naming keys, before anything is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from replicas.model.checkpoint import FilesAsRead
from replicas.model.checkpoint_mismatch import CheckpointMismatch
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model_support import UnsupportedModel
from replicas.settings import ModelSettings
from tests.engines.local_system import LocalSystem
from tests.engines.random_model import save_random_model, tiny_config
from tests.engines.tiny_model import tiny_settings

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDINGS, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 61)), [7]]


def save(folder: Path, seed: int = 0, **changes: Any) -> None:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": None,
    }
    LlamaForCausalLM(LlamaConfig(**config | changes)).save_pretrained(folder)


def edit_tensors(folder: Path, edit: Callable[[Tensors], Tensors | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edited = edit(tensors)
    save_file(tensors if edited is None else edited, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path) -> LoadedModel:
    return load_model(ModelSettings(str(folder), "", "float32", 256, "auto", False), CPU)


def tensors(edit: Callable[[Tensors], Tensors | None]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, edit)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def _without(*names: str) -> Callable[[Path], None]:
    return tensors(lambda t: {k: v for k, v in t.items() if not any(name in k for name in names)})


def _set(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return tensors(lambda t: t | {name: make(t[name].clone())})


def _first_to(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[5] = value
        return tensor

    return change


def _cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def _as_integers(t: Tensors) -> Tensors:
    return {k: (v * 100).to(torch.int8) if v.dim() > 1 else v for k, v in t.items()}


def _pickled(folder: Path, change: Callable[[Tensors], Tensors] = dict) -> None:
    torch.save(change(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _two_checkpoints(folder: Path) -> None:
    """Shards of one beside the single file of another, as a download over an old folder leaves them."""
    other = (folder / "model.safetensors").read_bytes()
    _set(Q, _first_to(1.0))(folder)
    _shards(folder)
    (folder / "model.safetensors").write_bytes(other)


def _shards(folder: Path, *, lose: str = "", twice: str = "", within: str = "", integers: bool = False) -> None:
    """Two shards and their index; then one of them, or a tensor within one, is lost, or is in both, unlike."""
    whole = load_file(folder / "model.safetensors")
    if integers:
        whole = _as_integers(whole)
    (folder / "model.safetensors").unlink()
    (folder / within).mkdir(exist_ok=True)
    shards = (f"{within}model-00001-of-00002.safetensors", f"{within}model-00002-of-00002.safetensors")
    of = {name: shards[i % 2] for i, name in enumerate(sorted(whole))}
    for shard in shards:
        held = {k: v if of[k] == shard else v + 1 for k, v in whole.items() if of[k] == shard or k == twice}
        save_file({k: v for k, v in held.items() if k != lose}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    if lose in shards:
        (folder / lose).unlink()


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "a projection is missing": ({}, _without(Q), f"lacks {Q}"),
    "the head of an untied model is missing": ({}, _without(HEAD), f"lacks {HEAD}"),
    "a norm is missing": ({}, _without(NORM), f"lacks {NORM}"),
    "the embeddings are missing": ({}, _without(EMBEDDINGS), f"lacks {EMBEDDINGS}"),
    "the embeddings of a tied model are missing": (
        {"tie_word_embeddings": True},
        _without(EMBEDDINGS, HEAD),
        EMBEDDINGS,
    ),
    "a whole layer is missing": ({}, _without("layers.1."), r"lacks model\.layers\.1\..* and 3 more"),
    "the last layer is missing": ({}, _without("layers.2."), r"lacks model\.layers\.2\."),
    "all names have a prefix": (
        {},
        tensors(lambda t: {f"wrapped.{k}": v for k, v in t.items()}),
        r"lacks .*no place for wrapped\.",
    ),
    "all names have the prefix of a parallel training": (
        {},
        tensors(lambda t: {f"module.{k}": v for k, v in t.items()}),
        r"no place for module\.",
    ),
    "one name has a typing error": (
        {},
        tensors(
            lambda t: {k.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.qproj"): v for k, v in t.items()}
        ),
        rf"lacks {Q}; the model has no place for model\.layers\.1\.self_attn\.qproj\.weight",
    ),
    "the config has more layers": ({}, config(num_hidden_layers=4), r"lacks model\.layers\.3\."),
    "the config has fewer layers": ({}, config(num_hidden_layers=2), r"no place for model\.layers\.2\."),
    "a bias that the config does not have": (
        {},
        tensors(lambda t: t | {Q.replace("weight", "bias"): torch.ones(64)}),
        r"no place for .*q_proj\.bias",
    ),
    "the config has biases": ({}, config(attention_bias=True), r"lacks .*q_proj\.bias"),
    "an adapter beside the weights": (
        {},
        tensors(lambda t: t | {Q.replace("weight", "lora_A.weight"): torch.ones(4, 64)}),
        r"no place for .*lora_A",
    ),
    "fewer KV heads in the config": (
        {},
        config(num_key_value_heads=1),
        r"k_proj\.weight \(\[32, 64\] instead of \[16, 64\]",
    ),
    "a transposed matrix": (
        {},
        _set("model.layers.0.mlp.down_proj.weight", lambda t: t.t().contiguous()),
        r"down_proj\.weight \(\[96, 64\] instead of \[64, 96\]",
    ),
    "more words than embeddings": ({}, config(vocab_size=300), r"embed_tokens\.weight \(\[256, 64\] instead of \[300"),
    "fewer words than embeddings": ({}, config(vocab_size=200), r"embed_tokens\.weight"),
    "tied by the config, unlike in the file": ({}, config(tie_word_embeddings=True), "tie_word_embeddings"),
    "a number that is none": ({}, _set(Q, _first_to(float("nan"))), f"not finite numbers: {Q}"),
    "an infinite number": ({}, _set(NORM, _first_to(float("-inf"))), f"not finite numbers: {NORM}"),
    "a matrix of zeros": ({}, _set(Q, torch.zeros_like), f"nothing but zeros: {Q}"),
    "integers for weights": ({}, _set(Q, lambda t: (t * 100).to(torch.int8)), f"{Q} .I8"),
    "8-bit floats without their scales": ({}, _set(Q, lambda t: t.to(torch.float8_e4m3fn)), f"{Q} .F8_E4M3"),
    "a tensor missing in one of two shards": ({}, lambda f: _shards(f, lose=Q), f"lacks {Q}"),
    "a tensor in both of two shards": ({}, lambda f: _shards(f, twice=Q), f"several files of the checkpoint have {Q}"),
    "integers in shards that lie elsewhere": ({}, lambda f: _shards(f, within="w/", integers=True), "stored quantised"),
    "integers in a file of PyTorch": ({}, lambda f: _pickled(f, _as_integers), "stored quantised"),
    "a file beside the shards of another": ({}, _two_checkpoints, r"two checkpoints, model\.safetensors and"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_naming_keys(case: str, tmp_path: Path) -> None:
    changes, spoil, words = REFUSED[case]
    save(tmp_path, **changes)
    load(tmp_path)  # whole, it is taken
    spoil(tmp_path)
    with pytest.raises(CheckpointMismatch, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [_cut_file, lambda folder: _shards(folder, lose="model-00002-of-00002.safetensors")],
    ids=["a file cut short", "a shard missing"],
)
def test_files_that_are_not_whole_are_refused(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    spoil(tmp_path)
    with pytest.raises((OSError, CheckpointMismatch), match=r"safetensors"):
        load(tmp_path)


def test_weights_that_are_not_quantised_as_the_config_says_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(UnsupportedModel, match=r"q_proj.weight is float32\[64, 64\] instead of float8_e4m3fn"):
        load(tmp_path)


# -- what may differ from the rule, and is right all the same ----------------------------------------------------


def _as_base_model(t: Tensors) -> Tensors:
    return {k.removeprefix("model."): v for k, v in t.items()}


def _old_frequencies(t: Tensors) -> Tensors:
    return t | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}


def _only_file_indexed(folder: Path) -> None:
    of = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))


RIGHT: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
    "a tied model": ({"tie_word_embeddings": True}, lambda folder: None),
    "a tied model that has its head too": (
        {"tie_word_embeddings": True},
        tensors(lambda t: t | {HEAD: t[EMBEDDINGS].clone()}),
    ),
    "a tied model that has only its head": (
        {"tie_word_embeddings": True},
        tensors(lambda t: {HEAD if k == EMBEDDINGS else k: v for k, v in t.items()}),
    ),
    "a tied model saved without its head's class": ({"tie_word_embeddings": True}, tensors(_as_base_model)),
    "frequencies that old checkpoints have": ({}, tensors(_old_frequencies)),
    "two shards": ({}, _shards),
    "shards that lie elsewhere": ({}, lambda folder: _shards(folder, within="weights/")),
    "a file of PyTorch": ({}, _pickled),
    "an index of the only file": ({}, _only_file_indexed),
    "a link to nowhere beside it": ({}, lambda folder: (folder / "old.json").symlink_to("/nowhere/old.json")),
    "half precision in the file": ({}, tensors(lambda t: {k: v.half() for k, v in t.items()})),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_transformers_loads_whole_gives_its_text(case: str, tmp_path: Path) -> None:
    changes, alter = RIGHT[case]
    save(tmp_path, **changes)
    expected_of = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if "half" in case:
        expected_of = expected_of.half().float()
    alter(tmp_path)
    assert greedy(tmp_path) == reference(expected_of)


def reference(model: Any) -> list[list[int]]:
    """transformers' own greedy tokens."""
    texts = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def greedy(folder: Path) -> list[list[int]]:
    """Ours, by one engine that does both phases."""
    settings = tiny_settings("decode", folder)
    system = LocalSystem(replace(settings, model=replace(settings.model, max_model_len=512)), None)
    try:
        return [g.token_ids[0] for g in system.run([system.generation(prompt, 12) for prompt in PROMPTS])]
    finally:
        system.close()


# -- what is loaded stays what was loaded --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "key"),
    [
        ("GPTNeoXConfig", "gpt_neox.layers.0.attention.bias"),
        ("GPT2Config", "transformer.h.0.attn.bias"),
        ("GPT2Config", "transformer.h.0.attn.masked_bias"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_that_old_checkpoints_have_count_for_nothing(
    config_class: str, key: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Those of Pythia have them as booleans."""
    save_random_model(tiny_config(config_class), tmp_path)
    without = load(tmp_path).identity
    edit_tensors(tmp_path, lambda t: t | {key: torch.ones(1, 1, 8, 8).to(dtype)})
    assert load(tmp_path).identity == without


def test_writing_to_the_file_does_not_change_what_runs(tmp_path: Path) -> None:
    save(tmp_path)
    expected = reference(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    settings = tiny_settings("decode", tmp_path)
    system = LocalSystem(replace(settings, model=replace(settings.model, max_model_len=512)), None)
    try:
        path = tmp_path / "model.safetensors"
        size = path.stat().st_size
        with path.open("r+b") as file:  # the same file, as `cp` writes it
            file.seek(size // 8)
            file.write(bytes(size - size // 8))
        got = [g.token_ids[0] for g in system.run([system.generation(prompt, 12) for prompt in PROMPTS])]
    finally:
        system.close()
    assert got == expected


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", seed=1)
    now = FilesAsRead.now

    def change_after(folder: str) -> FilesAsRead:
        files = now(folder)
        monkeypatch.setattr(FilesAsRead, "now", staticmethod(now))
        shutil.copyfile(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")
        return files

    monkeypatch.setattr(FilesAsRead, "now", staticmethod(change_after))
    with pytest.raises(CheckpointMismatch, match=r"model.safetensors in .* changed while it was read"):
        load(tmp_path / "a")
