"""What is chosen for a machine, a model and what the user said: a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import config_of_values, load_config
from cluster.config.root import Config
from cluster.launch.choice_lines import describe
from cluster.launch.fit import machine_findings, model_findings
from cluster.launch.machine import Gpu, Machine
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts
from cluster.launch.start_choice import Said, StartChoice, choose
from cluster.user_error import ConfigError

ROOT = Path(__file__).parents[2]
GB = 10**9
LAPTOP = Machine(2, 24 * GB, 20 * GB)
SERVER = Machine(64, 512 * GB, 500 * GB)
SMALL = Machine(1.5, 4 * GB, 3 * GB, cores_limit="the container's limit", memory_limit="the container's limit")
H200 = Gpu("NVIDIA H200", 150 * GB, (9, 0))
T4 = Gpu("Tesla T4", 16 * GB, (7, 5))
ONE_CARD = Machine(16, 128 * GB, 120 * GB, (H200,))
FOUR_CARDS = Machine(64, 512 * GB, 500 * GB, (H200,) * 4)
OLD_CARDS = Machine(8, 64 * GB, 60 * GB, (T4, T4))
# Llama-3.1-8B: 32 layers of 8 heads of 128.
LLAMA_8B = ModelFacts(131_072, 8_030_261_248, 32 * 2 * 8 * 128)
SMALL_CONTEXT = ModelFacts(1_024, 124_439_808, 12 * 2 * 768)
UNKNOWN = ModelFacts()


def chosen(machine: Machine, model: ModelFacts = BUNDLED_FACTS, **said: Any) -> tuple[StartChoice, Config]:
    """And the config that it makes, which must be one that the machine can serve."""
    of = Said("bundled", **said)
    choice = choose(machine, model, of)
    config = config_of_values(choice.values("bundled"), of.settings)
    findings = [*machine_findings(config, machine), *model_findings(config, machine, model)]
    assert [finding for finding in findings if finding.is_error] == []
    return choice, config


def shape(config: Config) -> tuple[str, str, dict[str, int], str]:
    counts = {name: pool.replicas for name, pool in config.pools.deployed().items()}
    return config.layout, config.pools.decode.device, counts, config.model.dtype


TABLE: dict[str, tuple[Machine, ModelFacts, dict[str, Any], tuple[str, str, dict[str, int], str], int]] = {
    # machine, model, said; layout, device, replicas, dtype; max_model_len
    "no GPU": (LAPTOP, BUNDLED_FACTS, {}, ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 2048),
    "a short model": (LAPTOP, SMALL_CONTEXT, {}, ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 1024),
    "little memory": (SMALL, BUNDLED_FACTS, {}, ("colocated", "cpu", {"decode": 1}, "float32"), 2048),
    "one copy fits": (
        Machine(8, 64 * GB, 60 * GB),
        LLAMA_8B,
        {},
        ("colocated", "cpu", {"decode": 1}, "float32"),
        2048,
    ),
    "one copy fits as bfloat16": (
        Machine(8, 32 * GB, 30 * GB),
        LLAMA_8B,
        {},
        ("colocated", "cpu", {"decode": 1}, "bfloat16"),
        2048,
    ),
    "split as said": (SMALL, BUNDLED_FACTS, {"settings": {"layout": "split"}},
                      ("split", "cpu", {"prefill": 1, "decode": 1}, "bfloat16"), 2048),
    "nothing known of the model": (LAPTOP, UNKNOWN, {}, ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 2048),
    "no prefill": (LAPTOP, BUNDLED_FACTS, {"prefill": 0}, ("colocated", "cpu", {"decode": 1}, "float32"), 2048),
    "more of both": (SERVER, BUNDLED_FACTS, {"prefill": 2, "decode": 3},
                     ("split", "cpu", {"prefill": 2, "decode": 3}, "float32"), 2048),
    "one card": (ONE_CARD, LLAMA_8B, {}, ("two_lanes", "cuda", {"decode": 1}, "bfloat16"), 32_768),
    "four cards": (FOUR_CARDS, LLAMA_8B, {}, ("split", "cuda", {"prefill": 1, "decode": 3}, "bfloat16"), 32_768),
    "cards without bfloat16": (OLD_CARDS, SMALL_CONTEXT, {},
                               ("split", "cuda", {"prefill": 1, "decode": 1}, "float16"), 1024),
    "what fits on a card": (
        replace(ONE_CARD, gpus=(Gpu("L4", 20 * GB, (8, 9)),)),
        LLAMA_8B,
        {},
        ("two_lanes", "cuda", {"decode": 1}, "bfloat16"),
        13_520,
    ),
    "a card that does not tell its memory": (replace(ONE_CARD, gpus=(Gpu("NVIDIA GB10", 0, (12, 1)),)), LLAMA_8B, {},
                                             ("two_lanes", "cuda", {"decode": 1}, "bfloat16"), 32_768),
    "three that decode": (FOUR_CARDS, LLAMA_8B, {"decode": 2},
                          ("split", "cuda", {"prefill": 2, "decode": 2}, "bfloat16"), 32_768),
    "three that prefill": (FOUR_CARDS, LLAMA_8B, {"prefill": 3},
                           ("split", "cuda", {"prefill": 3, "decode": 1}, "bfloat16"), 32_768),
    "no prefill on four cards": (FOUR_CARDS, LLAMA_8B, {"prefill": 0},
                                 ("two_lanes", "cuda", {"decode": 4}, "bfloat16"), 32_768),
    "the CPU though there is a card": (ONE_CARD, BUNDLED_FACTS, {"settings": {"pools.decode.device": "cpu"}},
                                       ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 2048),
    "another dtype": (LAPTOP, BUNDLED_FACTS, {"settings": {"model.dtype": "bfloat16"}},
                      ("split", "cpu", {"prefill": 1, "decode": 1}, "bfloat16"), 2048),
    "longer requests": (LAPTOP, BUNDLED_FACTS, {"settings": {"model.max_model_len": 8000}},
                        ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 8000),
    "a key of prefill": (LAPTOP, BUNDLED_FACTS, {"settings": {"pools.prefill.num_threads": 2}},
                         ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 2048),
    "positions that depend on the step": (
        LAPTOP, replace(BUNDLED_FACTS, step_reach=("longrope", 512)), {},
        ("split", "cpu", {"prefill": 1, "decode": 1}, "float32"), 512),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_choices(name: str) -> None:
    machine, model, said, expected, length = TABLE[name]
    _, config = chosen(machine, model, **said)
    assert (shape(config), config.model.max_model_len) == (expected, length)


def test_without_a_word_on_two_cores_it_is_what_configs_local_yaml_serves() -> None:
    assert chosen(LAPTOP)[1] == load_config(ROOT / "configs/local.yaml")


def test_without_prefill_on_two_cores_it_is_what_configs_colocated_yaml_serves() -> None:
    assert chosen(LAPTOP, prefill=0)[1] == load_config(ROOT / "configs/colocated.yaml")


def test_cards_are_served_as_the_configs_for_gpus_do() -> None:
    """But for what those say of a model, a proxy and an aim."""
    for machine, name in ((ONE_CARD, "gpu-one-card"), (replace(FOUR_CARDS, gpus=(H200, H200)), "gpu-1p1d")):
        _, config = chosen(machine, LLAMA_8B)
        by_hand = load_config(ROOT / f"configs/{name}.yaml")
        assert config.layout == by_hand.layout
        for pool, of in by_hand.pools.deployed().items():
            ours = config.pools.deployed()[pool].model_dump()
            assert {key: value for key, value in of.model_dump().items() if key != "lanes"} == {
                key: value for key, value in ours.items() if key != "lanes"
            }


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (1.5, 1), (4, 2), (7, 3), (16, 8), (64, 16)])
def test_threads_never_exceed_the_cores(cores: float, threads: int) -> None:
    choice, _ = chosen(replace(LAPTOP, num_cores=cores))
    assert choice.num_threads == threads


@pytest.mark.parametrize("available", range(2, 12))
def test_kv_memory_shrinks_with_what_is_free_but_holds_one_request(available: int) -> None:
    machine = Machine(4, 12 * GB, available * GB)
    choice, config = chosen(machine)
    for pool in config.pools.deployed().values():
        assert pool.kv_capacity_tokens is not None
        assert pool.kv_capacity_tokens >= config.model.max_model_len
        assert pool.kv_capacity_tokens % config.kv.block_size == 0
    kv = sum(size["kv_capacity_tokens"] for size in choice.kv.values()) * BUNDLED_FACTS.kv_bytes_per_token("float32")
    # Below some 3 GB there is no choice but to try.
    assert choice.num_engines * BUNDLED_FACTS.weights_bytes(choice.dtype) + kv <= available * GB


def test_a_size_that_was_said_is_the_only_one() -> None:
    choice, config = chosen(LAPTOP, settings={"pools.decode.kv_memory_bytes": 2 * 10**9})
    assert choice.kv == {"prefill": {"kv_capacity_tokens": 8192}, "decode": {}}
    assert config.pools.decode.kv_memory_bytes == 2 * 10**9


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"pools.decode.kv_capacity_tokens": 1024}, 1024),
        ({"pools.prefill.kv_capacity_tokens": 1024, "pools.decode.kv_capacity_tokens": 4096}, 1024),
        ({"pools.decode.kv_memory_bytes": 50_000_000}, 1072),
        ({"limits.max_generated_tokens": 1500}, 1500),
        ({"limits.max_text_chars": 1500, "pools.decode.kv_capacity_tokens": 1600}, 1500),
        ({"pools.decode.kv_capacity_tokens": 8192}, 2048),
    ],
)
def test_a_request_is_no_longer_than_other_keys_allow(settings: dict[str, int], length: int) -> None:
    for model in (BUNDLED_FACTS, UNKNOWN):
        if model is UNKNOWN and "pools.decode.kv_memory_bytes" in settings:
            continue  # nobody knows what a token takes
        choice, config = chosen(LAPTOP, model, settings=settings)
        assert (choice.max_model_len, config.model.max_model_len) == (length, length)


def test_other_blocks_are_counted_in() -> None:
    settings = {"kv.block_size": 128, "model.max_model_len": 1000}
    _, config = chosen(Machine(2, 8 * GB, 3 * GB), settings=settings)
    assert config.pools.decode.kv_capacity_tokens is not None
    assert config.pools.decode.kv_capacity_tokens % 128 == 0


def test_numbers_that_are_none_are_refused_by_the_config_with_their_key() -> None:
    settings = {"model.max_model_len": "8k", "pools.decode.replicas": True, "model.dtype": "fp16", "layout": 3}
    said = Said("bundled", settings=settings)
    for machine in (LAPTOP, ONE_CARD, FOUR_CARDS):
        values = choose(machine, BUNDLED_FACTS, said).values("bundled")
        with pytest.raises(ConfigError) as raised:
            config_of_values(values, settings)
        assert {line.split(": ")[1] for line in raised.value.lines} == settings.keys()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"prefill": 0, "settings": {"layout": "split"}}, "--prefill 0: layout split needs a prefill replica"),
        ({"prefill": 2, "settings": {"layout": "colocated"}}, "--prefill 2: layout colocated has no prefill pool"),
        ({"prefill": 1, "settings": {"layout": "two_lanes"}}, "--prefill 1: layout two_lanes has no prefill pool"),
    ],
)
def test_layouts_that_contradict_each_other(said: dict[str, Any], line: str) -> None:
    for machine in (LAPTOP, FOUR_CARDS):
        with pytest.raises(ConfigError, match=line):
            choose(machine, BUNDLED_FACTS, Said("bundled", **said))


@pytest.mark.parametrize("name", TABLE)
def test_lines_say_what_was_chosen_and_why(name: str) -> None:
    machine, model, said, (layout, device, counts, dtype), length = TABLE[name]
    of = Said("bundled", **said)
    text = describe(choose(machine, model, of), machine, model, of)
    assert len(text.splitlines()) == 6
    for part in (
        layout,
        f"{device}: ",
        dtype,
        f"{length:,} tokens a request",
        *(f"{n} {p}" for p, n in counts.items()),
    ):
        assert part in text
    if machine is SMALL:
        assert text.count("the container's limit") == 2
