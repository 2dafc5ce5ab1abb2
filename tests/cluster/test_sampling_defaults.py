"""Sampling defaults of a checkpoint, from generation_config.json: in force where a client leaves a field out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from cluster.config.root import Config
from cluster.openai.sampling_defaults import SamplingDefaults, checkpoint_defaults
from cluster.serving.checkpoint_parts import load_defaults
from cluster.text.tokenizer import Tokenizer
from cluster.user_error import ConfigError
from scheduler.sampling_params import SamplingParams
from tests.cluster.fake_ingress import LENGTH, ByteTokenizer, FakeIngress, ScriptedSource, text
from tests.model_folder import model_folder

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POOLS = {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}


def folder_with(tmp_path: Path, generation_config: dict[str, Any]) -> str:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    return str(tmp_path)


# --- the file ------------------------------------------------------------------------------------------------------


def test_what_vllm_heeds_is_read_and_nothing_else(tmp_path: Path) -> None:
    others = {"do_sample": False, "num_beams": 4, "max_length": 20, "typical_p": 0.5, "eos_token_id": 2, "x": [1]}
    defaults = checkpoint_defaults(folder_with(tmp_path, RECOMMENDED | {"max_new_tokens": 64} | others))
    assert defaults == SamplingDefaults(RECOMMENDED, 64)
    assert defaults.described() == RECOMMENDED | {"max_new_tokens": 64}


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None, "max_new_tokens": None}, {}),
        (
            {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0},
            {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0},
        ),
        ({"top_k": 50.0}, {"top_k": 50}),
    ],
)
def test_null_is_left_out_and_values_mean_what_they_mean_in_a_request(
    tmp_path: Path, content: dict[str, Any], fields: dict[str, float]
) -> None:
    assert checkpoint_defaults(folder_with(tmp_path, content)) == SamplingDefaults(fields, None)


def test_config_json_recommends_nothing(tmp_path: Path) -> None:
    """There, old versions of transformers wrote their own defaults."""
    (tmp_path / "config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 50}))
    assert checkpoint_defaults(str(tmp_path)) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", 3, "must be less than or equal to 2"),
        ("temperature", -0.1, "must be greater than or equal to 0"),
        ("temperature", "0.7", "must be a number"),
        ("temperature", True, "must be a number"),
        ("temperature", float("nan"), "must be a finite number"),
        ("top_p", 0, "must be greater than 0"),
        ("top_p", 1.01, "must be less than or equal to 1"),
        ("top_k", -2, "must be greater than or equal to -1"),
        ("top_k", 1.5, "must be an integer"),
        ("min_p", 2, "must be less than or equal to 1"),
        ("repetition_penalty", 0, "must be greater than or equal to"),
        ("max_new_tokens", 0, "must be greater than or equal to 1"),
    ],
)
def test_what_no_request_may_have_is_refused_with_file_field_and_fix(
    tmp_path: Path, name: str, value: Any, reason: str
) -> None:
    folder = folder_with(tmp_path, RECOMMENDED | {name: value})
    with pytest.raises(ConfigError) as caught:
        checkpoint_defaults(folder)
    message = str(caught.value)
    assert message.startswith(f"generation_config.json of the model: {name} {reason}")
    assert message.endswith("model.sampling_defaults: none")


def test_the_bundled_model_recommends_nothing() -> None:
    assert checkpoint_defaults(model_folder()) == SamplingDefaults()


@pytest.mark.parametrize("kind", ["checkpoint", "none"])
def test_the_config_decides_and_one_line_of_the_log_says_what_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    wrong_but_unread = {"top_p": 0} if kind == "none" else {}
    folder = folder_with(tmp_path, RECOMMENDED | wrong_but_unread)
    config = Config.model_validate({"model": {"sampling_defaults": kind}, "pools": POOLS})
    with caplog.at_level(logging.INFO, "cluster.serving.checkpoint_parts"):
        defaults = load_defaults(folder, config, cast("Tokenizer", ByteTokenizer()))
    expected = RECOMMENDED if kind == "checkpoint" else {}
    assert defaults == SamplingDefaults(expected)
    (record,) = (record for record in caplog.records if vars(record).get("event") == "checkpoint_defaults")
    assert record.message == "ends and defaults of the checkpoint"
    said = vars(record)
    assert (said["eos_token_ids"], said["sampling_defaults"]) == ([256], kind)
    assert {name: said[name] for name in RECOMMENDED if name in said} == expected


# --- requests ------------------------------------------------------------------------------------------------------


async def ask(
    path: str, fields: dict[str, Any], defaults: SamplingDefaults, **limits: float
) -> tuple[SamplingParams, int]:
    """What the engine is asked for: parameters and max_tokens. The request must be answered."""
    source = ScriptedSource(hi=[step for choice in range(3) for step in text(choice, "x", LENGTH)])
    app = FakeIngress(source, defaults=defaults, **limits).app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
        response = await http.post(path, json=prompt | fields)
    assert response.status_code == 200, response.text
    (spec,) = source.specs
    return spec.sampling, spec.max_tokens


def chosen_by(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in RECOMMENDED}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "sent",
    [
        {},
        dict.fromkeys(RECOMMENDED),
        {"temperature": 1.0, "repetition_penalty": 1.0},  # OpenAI's own default, but sent
        {"temperature": 0},
        {"top_k": -1, "top_p": 1, "min_p": 0.0},
        {"seed": 1, "presence_penalty": 0.5},
    ],
)
async def test_the_client_goes_before_the_checkpoint(path: str, sent: dict[str, Any]) -> None:
    params, _ = await ask(path, sent, SamplingDefaults(RECOMMENDED))
    given = {name: value for name, value in sent.items() if name in RECOMMENDED and value is not None}
    assert chosen_by(params) == RECOMMENDED | given | ({"top_k": 0} if "top_k" in given else {})
    assert params.presence_penalty == sent.get("presence_penalty", 0.0)


async def test_without_defaults_openais_hold() -> None:
    params, _ = await ask(CHAT, {}, SamplingDefaults())
    assert chosen_by(params) == {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


@pytest.mark.parametrize("sent", [{}, {"temperature": 0}, {"temperature": None, "top_p": None}])
async def test_beam_search_neither_has_defaults_nor_is_refused_for_them(sent: dict[str, Any]) -> None:
    beams = {"use_beam_search": True, "n": 2, "best_of": 3} | sent
    params, max_tokens = await ask(TEXT, beams, SamplingDefaults(RECOMMENDED, 9))
    without, same = await ask(TEXT, beams, SamplingDefaults())
    assert chosen_by(params) == chosen_by(without)
    assert max_tokens == same == 16


async def test_other_combinations_are_judged_by_what_was_sent() -> None:
    sent = {"best_of": 3, "n": 1, "min_tokens": 2, "max_tokens": 4, "allowed_token_ids": [65, 66]}
    params, _ = await ask(TEXT, sent, SamplingDefaults(RECOMMENDED))
    assert chosen_by(params) == RECOMMENDED


async def test_max_new_tokens_is_for_chats_that_give_none() -> None:
    defaults = SamplingDefaults({}, 9)
    assert (await ask(CHAT, {}, defaults))[1] == 9
    assert (await ask(CHAT, {"max_tokens": None}, defaults))[1] == 9
    assert (await ask(CHAT, {"max_tokens": 30}, defaults))[1] == 30
    assert (await ask(CHAT, {"max_completion_tokens": 30}, defaults))[1] == 30
    assert (await ask(CHAT, {}, defaults, max_tokens_default_chat=20))[1] == 20
    assert (await ask(CHAT, {}, SamplingDefaults({}, 10_000)))[1] == 510  # the rest of the context
    assert (await ask(TEXT, {}, defaults))[1] == 16


async def test_the_published_description_has_the_defaults_in_force() -> None:
    app = FakeIngress(ScriptedSource(), defaults=SamplingDefaults({"temperature": 0.6, "top_k": 20})).app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
        schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    for body in ("ChatCompletionBody", "CompletionBody"):
        fields = schemas[body]["properties"]
        assert {name: fields[name]["default"] for name in ("temperature", "top_k", "top_p", "min_p")} == {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 1.0,
            "min_p": 0.0,
        }
