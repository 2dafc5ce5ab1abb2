"""The options of `splitserve serve` and `check`: what is served, and what is said of it on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from cluster.config.key_tree import KeyTree, either
from cluster.config.root import Config
from cluster.config.yaml_document import YamlError, parse_yaml
from cluster.launch.start import Typed
from cluster.user_error import ConfigError

_WHAT = (
    "a model: a folder, a .gguf file, or a Hub id org/name, served as this machine can; or a config, a YAML file such "
    "as configs/local.yaml. Default: the small model that comes with SplitServe"
)


def add_start_options(parser: argparse.ArgumentParser, what: str = _WHAT) -> None:
    parser.add_argument("what", metavar="MODEL|CONFIG", nargs="?", help=what)
    parser.add_argument(
        "--prefill", type=_count, metavar="N", help="replicas that compute prompts; 0: one pool does both"
    )
    parser.add_argument("--decode", type=_count, metavar="N", help="replicas that generate")
    parser.add_argument("--host", help="address to listen on: server.host")
    parser.add_argument("--port", type=int, help="TCP port: server.port")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="any key of a config, such as model.max_model_len=4096 (configs/local.yaml has all of them); repeatable",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="write the config file that would be served, and start nothing"
    )


def typed(arguments: argparse.Namespace) -> Typed:
    """What the options say. Raises ConfigError, a line for each `--set` that is wrong."""
    settings, problems = _settings(arguments.settings)
    for key, value in (("server.host", arguments.host), ("server.port", arguments.port)):
        if value is not None and key in settings:
            problems.append(f"--set {key}: given beside --{key.rpartition('.')[2]}; leave one out")
        elif value is not None:
            settings[key] = value
    for pool, count in (("prefill", arguments.prefill), ("decode", arguments.decode)):
        if count is not None and f"pools.{pool}.replicas" in settings:
            problems.append(f"--set pools.{pool}.replicas: given beside --{pool}; leave one out")
    if arguments.decode == 0:
        problems.append("--decode 0: somebody must generate; expected 1 or more")
    if problems:
        raise ConfigError(*problems)
    return Typed(arguments.what, arguments.prefill, arguments.decode, settings)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas; expected 0, 1, 2 and so on")
    return int(text)


def _settings(given: list[str]) -> tuple[dict[str, Any], list[str]]:
    """By dotted key; and what is wrong. Types are checked with the whole config."""
    tree = KeyTree(Config.model_json_schema())
    settings: dict[str, Any] = {}
    problems = []
    for text in given:
        key, equals, value = text.partition("=")
        key = key.strip()
        try:
            document = parse_yaml(value)
        except YamlError as error:
            problems.append(f"--set {key}: {value!r} is not valid YAML: {error}")
            continue
        if not equals or not key:
            problems.append(f"--set {text}: expected KEY=VALUE, such as --set model.max_model_len=4096")
        else:
            for path, part in _parts(tuple(key.split(".")), document.values, tree):
                name = ".".join(path)
                if path not in tree:
                    problems.append(f"--set {name}: {_unknown(path, tree)}")
                elif name in settings:
                    problems.append(f"--set {name}: given twice")
                else:
                    settings[name] = part
    return settings, problems


def _parts(path: tuple[str, ...], value: Any, tree: KeyTree) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys of a whole section, each by itself: what is chosen for the others stays."""
    if isinstance(value, dict) and value and path in tree and tree.is_section(path):
        for name, part in value.items():
            yield from _parts((*path, str(name)), part, tree)
    else:
        yield path, value


def _unknown(path: tuple[str, ...], tree: KeyTree) -> str:
    """Whole keys, as `--set` wants them."""
    meant = [".".join(known) for known in tree.meant(path)]
    if meant:
        return f"unknown key; did you mean {either(meant)}?"
    place = next(path[:end] for end in range(len(path) - 1, -1, -1) if path[:end] in tree)
    names = [".".join((*place, name)) for name in tree.keys_under(place)]
    return f"unknown key; there are {', '.join(names)}" if names else f"unknown key; {'.'.join(place)} has no keys"
