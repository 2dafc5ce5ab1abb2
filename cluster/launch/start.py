"""From what was typed to a config that this machine can serve, or to the reasons why not. Before Ray, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config.file import config_of_values, load_config
from cluster.config.model import BUNDLED_SOURCE, ModelConfig, SourceKind
from cluster.config.root import Config
from cluster.http.server_address import check_address
from cluster.launch.checkpoint_facts import checkpoint_facts, config_facts
from cluster.launch.choice_lines import describe
from cluster.launch.disk import disk_findings
from cluster.launch.draft_facts import draft_facts
from cluster.launch.fit import Finding, describe_memory, draft_findings, machine_findings, model_findings
from cluster.launch.machine import Machine
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts
from cluster.launch.packages import missing_packages
from cluster.launch.start_choice import Said, choose
from cluster.launch.start_waits import start_wait_findings
from cluster.terminal.steps import Steps
from cluster.user_error import ConfigError
from replicas.hub_model import HUB_ID, HubModel, HubRefusal, HubUnreachable, copy_in_cache, fetch, find_on_hub
from replicas.model_support import UnsupportedModel

_PORT_PATIENCE_S = 5.0
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_EXPECTED = 'expected a folder with a config.json, a .gguf file, a Hub id "org/name", or a config file such as '
_EXPECTED += "configs/local.yaml"


@dataclass(frozen=True, slots=True)
class Typed:
    """What the user typed. what: a model or a config file; None: the model that comes with SplitServe. settings: by
    dotted key.
    """

    what: str | None
    prefill: int | None
    decode: int | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """chosen: lines on what was chosen; empty where a config file says all. memory: a line. hub: where the model has
    still to be fetched from; draft_hub: likewise what drafts for it. folder: a copy of a model of the Hub that can be
    served as it is.
    """

    config: Config
    chosen: str
    memory: str
    warnings: tuple[str, ...]
    hub: HubModel | None = None
    folder: Path | None = None
    draft_hub: HubModel | None = None

    def as_yaml(self) -> str:
        """A config file that serves the same, wherever it is put."""
        head = "Chosen by `splitserve serve --print-config` on this machine, for this model:\n" if self.chosen else ""
        head += self.chosen or "Made by `splitserve serve --print-config`."
        head += "\nKeys left out have the defaults that configs/local.yaml shows and explains, one by one."
        comment = "".join(f"# {line.strip()}\n" for line in head.splitlines())
        values = self.config.model_dump(mode="json", exclude_unset=True)
        return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def plan_start(typed: Typed, machine: Machine) -> Start:
    """Asks the Hub where the model is there. Raises ConfigError, all that is wrong, each with the key to change."""
    file = _config_file(typed.what)
    if file is not None:
        return _of_file(file, typed, machine)
    said = Said(_source(typed.what), typed.prefill, typed.decode, typed.settings)
    # What is wrong with what was typed is said before the model is looked at, which may take seconds.
    known = BUNDLED_FACTS if said.source == BUNDLED_SOURCE else ModelFacts()
    first = config_of_values(choose(machine, known, said).values(said.source), said.settings)
    _refuse(_without_model(first, machine))
    model, hub, folder = _look_at(first.model)
    choice = choose(machine, model, said)
    config = config_of_values(choice.values(said.source), said.settings)
    return _checked(config, machine, model, hub, folder, describe(choice, machine, model, said))


def ready_to_serve(start: Start) -> Config:
    """The config that replicas are given: a model of the Hub is fetched, and they are given its folder. Blocks for as
    long as that takes. Raises UserError.
    """
    server = start.config.server
    check_address(server.host, server.port, _PORT_PATIENCE_S)
    folder = start.folder
    if start.hub is not None:
        folder = _fetched(start.hub, with_weights=start.config.model.load_format != "dummy")
    # The name that clients send stays that of the Hub.
    given = {} if folder is None else {"model.source": str(folder), "model.name": start.config.model.name}
    if start.draft_hub is not None:
        given["speculative.model"] = str(_fetched(start.draft_hub))
    if not given:
        return start.config
    values = start.config.model_dump(mode="json", exclude_unset=True)
    config = config_of_values(values, given)
    if start.draft_hub is not None:
        draft = draft_facts(config.speculative, config.model)  # now with its tokens
        _refuse(() if draft is None else draft_findings(config, draft))
    _facts_of_files(config.model)  # what was fetched is all there
    return config


def _fetched(hub: HubModel, *, with_weights: bool = True) -> Path:
    """Blocks. Raises ConfigError."""
    try:
        size = hub.num_bytes if with_weights else None
        with Steps() as steps, steps.step(f"fetching {hub.hub_id} from the Hub", size, "bytes") as step:
            return fetch(hub, with_weights, step.reached)
    except HubRefusal as refusal:
        raise ConfigError(str(refusal)) from refusal


def _of_file(file: str, typed: Typed, machine: Machine) -> Start:
    config = load_config(file, typed.settings)
    if typed.prefill and config.pools.prefill is None:
        raise ConfigError(f"--prefill {typed.prefill}: {file} has layout {config.layout}, without a prefill pool")
    counts: dict[str, object] = {}
    for pool, count in (("prefill", typed.prefill), ("decode", typed.decode)):
        if count == 0:
            raise ConfigError(f"--{pool} 0: {file} says which pools there are; change layout and pools there")
        if count is not None:
            counts[f"pools.{pool}.replicas"] = count
    if counts:
        config = load_config(file, {**typed.settings, **counts})
    _refuse(_without_model(config, machine))
    return _checked(config, machine, *_look_at(config.model), chosen="")


def _checked(
    config: Config, machine: Machine, model: ModelFacts, hub: HubModel | None, folder: Path | None, chosen: str
) -> Start:
    draft = draft_facts(config.speculative, config.model)
    findings = [
        *_without_model(config, machine),
        *model_findings(config, machine, model, draft),
        *disk_findings(config.model, model),
    ]
    _refuse(findings)
    warnings = [finding.text for finding in findings]
    if folder is not None:
        warnings.append(f"model.source: the Hub can't be reached; what an earlier start fetched is used ({folder})")
    memory = describe_memory(config, machine, model, draft)
    return Start(config, chosen, memory, tuple(warnings), hub, folder, draft.hub if draft is not None else None)


def _without_model(config: Config, machine: Machine) -> list[Finding]:
    return [*missing_packages(config), *machine_findings(config, machine), *start_wait_findings(config)]


def _refuse(findings: Iterable[Finding]) -> None:
    errors = [finding.text for finding in findings if finding.is_error]
    if errors:
        raise ConfigError(*errors)


def _look_at(model: ModelConfig) -> tuple[ModelFacts, HubModel | None, Path | None]:
    """What the model is; where it is still to be fetched from; and else the copy of it that there is."""
    if model.kind is not SourceKind.HUB:
        return _facts_of_files(model), None, None
    try:
        found = find_on_hub(model.source, model.trust_remote_code)
    except HubUnreachable as refusal:
        copy = copy_in_cache(model.source)
        if copy is None:
            raise ConfigError(str(refusal)) from refusal
        try:
            return _facts_of_files(model.model_copy(update={"source": str(copy)})), None, copy
        except ConfigError as error:
            raise ConfigError(
                f"{refusal}. Of an earlier start there is a copy that can't be served: {error}"
            ) from error
    except HubRefusal as refusal:
        raise ConfigError(str(refusal)) from refusal
    try:
        return config_facts(found.config, model.trust_remote_code, found.counts, model.quantise), found, None
    except UnsupportedModel as refusal:
        raise ConfigError(f"model.source: {refusal}") from refusal


def _facts_of_files(model: ModelConfig) -> ModelFacts:
    try:
        return checkpoint_facts(model)
    except UnsupportedModel as refusal:
        raise ConfigError(f"model.source: {refusal}") from refusal


def _config_file(what: str | None) -> str | None:
    """The text if it names a config file; None for a model."""
    if what is None or what.endswith(".gguf"):
        return None
    if what.endswith((".yaml", ".yml")):
        return what
    path = Path(what).expanduser()
    if not path.is_file():
        return None
    if path.suffix in _WEIGHTS_SUFFIXES:
        raise ConfigError(f"{what}: is a file of weights; give the folder that it lies in, with its config.json")
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            raise ConfigError(f"{what}: is a GGUF file by its content; give it a name that ends in .gguf")
    return what


def _source(what: str | None) -> str:
    """As model.source has it. What exists on this machine goes before a model of that name on the Hub."""
    if what is None or what == BUNDLED_SOURCE:
        return BUNDLED_SOURCE
    path = Path(what).expanduser()
    if what.endswith(".gguf") or path.exists():
        return str(path.absolute())
    if HUB_ID.fullmatch(what):
        return what
    if "://" in what:
        raise ConfigError(f"{what}: is a URL; {_EXPECTED}")
    raise ConfigError(f"{what}: no such file or folder; {_EXPECTED}")
