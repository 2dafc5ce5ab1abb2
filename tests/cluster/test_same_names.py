"""Settings made of the config by names: whatever a section says arrives, and what does not fit is an error at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.config.file import load_config
from cluster.config.root import Config
from cluster.openai.engine_params import sampling_params
from cluster.openai.sampling import SamplingFields
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.router_limits import AttemptLimits, MigrationLimits, RouterLimits
from cluster.same_names import by_names
from cluster.serving.replica_settings import engine_settings
from cluster.simulation.router_times import RouterTimes
from replicas.channels.wire import Decoder, encode
from replicas.settings import EngineSettings, is_configured, unconfigured
from scheduler.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


class Inner(BaseModel):
    size: int = 3


class Section(BaseModel):
    inner: Inner = Inner()
    name: str = "here"
    folder: Path = Path("/some")
    words: list[str] = ["a", "b"]
    biases: dict[int, float] = {7: 0.5}


class Other(BaseModel):
    name: str = "there"


@dataclass(frozen=True, slots=True)
class InnerSettings:
    size: int


@dataclass(frozen=True, slots=True)
class Settings:
    inner: InnerSettings
    name: str
    folder: str
    words: tuple[str, ...]
    biases: tuple[tuple[int, float], ...] = ()
    patience_s: float = unconfigured(1.5)


def test_sections_become_settings_and_values_become_plain() -> None:
    expected = Settings(InnerSettings(3), "here", "/some", ("a", "b"), ((7, 0.5),), 1.5)
    assert by_names(Settings, Section()) == expected
    given = by_names(Settings, Section(), Other(), name="given", patience_s=2.0)
    assert given == dataclasses.replace(expected, name="given", patience_s=2.0)


class Renamed(BaseModel):
    inner: Inner = Inner()
    name: str = "here"
    folder: Path = Path("/some")
    words: list[str] = []
    bias: dict[int, float] = {}


class Patient(Section):
    patience_s: float = 9.0


@pytest.mark.parametrize(
    ("sources", "given", "reason"),
    [
        ([Renamed()], {}, "Settings.biases is in none of Renamed"),  # its default is no excuse
        ([Section(), Other()], {}, "Settings.name is in several of Section, Other"),
        ([Patient()], {}, "Settings.patience_s is unconfigured, but in Patient"),
        ([Section()], {"naem": "x"}, "Settings has no field naem"),
    ],
)
def test_what_does_not_fit_is_an_error(sources: list[BaseModel], given: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError) as error:
        by_names(Settings, *sources, **given)
    assert str(error.value) == reason


def other_value(value: Any) -> Any:
    """One that no default has by chance."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    return f"{value}-x" if isinstance(value, str) else value


def changed(section: Any) -> Any:
    values = {name: getattr(section, name) for name in type(section).model_fields}
    return section.model_copy(update={n: other_value(v) for n, v in values.items() if not isinstance(v, BaseModel)})


def check_arrived(settings: Any, *sections: BaseModel) -> int:
    """Every configured field has what a section of its name has now. How many were looked at."""
    keys = {name: getattr(section, name) for section in sections for name in type(section).model_fields}
    checked = 0
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in keys and is_configured(field) and not dataclasses.is_dataclass(value):
            expected = keys[field.name]
            assert value == (str(expected) if isinstance(expected, Path) else expected), field.name
            checked += 1
    return checked


@pytest.fixture(scope="module")
def config() -> Config:
    loaded = load_config(ROOT / "configs/local.yaml")
    sections = ("kv", "transfer", "lifecycle", "logging", "testing", "routing", "ingress")
    update: dict[str, Any] = {name: changed(getattr(loaded, name)) for name in sections}
    pools = {name: changed(pool) for name, pool in loaded.pools.deployed().items()}
    update["pools"] = loaded.pools.model_copy(update=pools)
    return loaded.model_copy(update=update)


@pytest.mark.parametrize(("pool_name", "num_keys"), [("decode", 10), ("prefill", 10)])
def test_engines_are_told_every_key_that_is_changed(config: Config, pool_name: str, num_keys: int) -> None:
    pool = config.pools.deployed()[pool_name]
    settings = engine_settings(pool_name, pool, config)
    assert isinstance(settings, EngineSettings)
    assert check_arrived(settings, pool) == num_keys
    for name, num_fields in (("kv", 2), ("transfer", 5), ("lifecycle", 2), ("logging", 2), ("testing", 2)):
        assert check_arrived(getattr(settings, name), getattr(config, name)) == num_fields
    assert settings.served_model_name == config.model.name
    assert settings.model.max_model_len == config.model.max_model_len


def test_routers_and_the_simulator_are_told_every_key_that_is_changed(config: Config) -> None:
    rules = by_names(RoutingRules, config.routing, config.slo, has_prefill_pool=True)
    assert check_arrived(rules, config.routing) == len(type(config.routing).model_fields)
    assert check_arrived(rules, config.slo) == 2
    attempt = by_names(AttemptLimits, config.ingress, config.transfer)
    migration = by_names(MigrationLimits, config.migration)
    sections = config.ingress, config.kv, config.lifecycle
    limits = by_names(RouterLimits, *sections, attempt=attempt, migration=migration)
    assert check_arrived(limits, config.ingress, config.kv, config.lifecycle) == 6
    assert check_arrived(attempt, config.ingress, config.transfer) == 2
    assert check_arrived(by_names(RouterTimes, config.ingress, config.transfer), config.ingress, config.transfer) == 5


class NoTokenizer:
    def check_ids(self, ids: list[int], name: str) -> None:
        assert all(isinstance(token_id, int) for token_id in ids)


def test_every_field_of_a_body_that_says_how_to_choose_arrives_at_the_engine() -> None:
    """Of fields to come too: what a rule needs is named in the body and in the parameters, and nowhere between."""
    neutral = SamplingParams()
    names = [field.name for field in dataclasses.fields(neutral) if field.name in SamplingFields.model_fields]
    assert {"temperature", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens"} <= {*names}
    odd = {"logit_bias": {5: 1.5, 6: -2.0}, "allowed_token_ids": [5, 6, 8], "seed": -1}
    values = odd | {name: other_value(getattr(neutral, name)) for name in names if name not in odd}
    body = SamplingFields().model_copy(update=values)
    params = sampling_params(body, NoTokenizer(), frozenset({2}), ((8,),), 4, None)  # type: ignore[arg-type]
    assert (params.logit_bias, params.allowed_token_ids) == (((5, 1.5), (6, -2.0)), (5, 6, 8))
    assert (params.seed, params.bad_words, params.num_logprobs) == (2**64 - 1, ((8,),), 4)
    for name in {*names} - {*odd, "bad_words"}:
        assert getattr(params, name) == values[name] != getattr(neutral, name)
    assert SamplingFields.token_id_fields() == ("logit_bias", "allowed_token_ids")
    assert Decoder(SamplingParams)(encode(params)) == params
