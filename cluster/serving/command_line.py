"""The command `splitserve`. Checks the config before anything slow (Ray, torch) is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.client.chat_command import add_chat_options, run_chat
from cluster.config.file import config_of, load_config, load_for_elsewhere
from cluster.config.root import Config
from cluster.config.summary import summarize
from cluster.config.yaml_document import YamlError, parse_yaml
from cluster.load.command_options import add_bench_options
from cluster.serving.serve_config import as_yaml, config_values, serve_config
from cluster.simulation.command_options import add_fit_options, add_simulate_options
from cluster.user_error import UserError
from cluster.version import VERSION

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of ours are printed without a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command in ("simulate", "fit-steps"):
        return _simulate(arguments)
    if arguments.command == "chat":
        return run_chat(arguments)
    if arguments.command == "bench":
        from cluster.load.command import run_bench  # here, not above: it loads numpy, for which others have no use

        return run_bench(arguments)
    if arguments.command == "deploy":
        return _deploy(arguments.config, arguments.output)
    if arguments.command == "check":
        served = _of_serve_config(arguments.config)
        config = load_config(arguments.config, _overrides(arguments)) if served is None else config_of(served)
        print(summarize(config))
        print("ok")
        return 0
    config = load_config(arguments.config, _overrides(arguments))
    _check_package_roots()
    return _serve(config)


def _of_serve_config(path: str) -> dict[str, Any] | None:
    """The values of a Serve config file; None if the file is another, or can't be read: whoever loads it says why."""
    try:
        return config_values(parse_yaml(Path(path).read_text(encoding="utf-8")).values)
    except (OSError, UnicodeDecodeError, YamlError):
        return None


def _simulate(arguments: argparse.Namespace) -> int:
    from cluster.simulation.command import run_fit, run_simulate  # here, not above: servers need no simulator

    if arguments.command == "fit-steps":
        return run_fit(arguments, print)
    return run_simulate(load_config(arguments.config, {}), arguments, print)


def _deploy(path: str, output: Path | None) -> int:
    values, config = load_for_elsewhere(path)
    text = as_yaml(serve_config(values, config), path)
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        output.write_text(text)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error
    print(f"written: {output}; on the cluster: serve deploy {output}")
    return 0


def _serve(config: Config) -> int:
    _check_node_labels(config)
    from cluster.serving.serve_command import run_server  # here, not above: it imports Ray

    return run_server(config)


def _check_node_labels(config: Config) -> None:
    """Replicas that want labels would wait for ever on the Ray that `serve` starts."""
    labels = {f"pools.{name}": pool.node_labels for name, pool in config.pools.deployed().items()}
    for key, wanted in {"ingress": config.ingress.node_labels, **labels}.items():
        if wanted:
            raise UserError(
                f"{key}.node_labels: the Ray of `splitserve serve` has no labels, a cluster's may: remove it"
            )


def _overrides(arguments: argparse.Namespace) -> dict[str, object]:
    given = {"server.host": arguments.host, "server.port": arguments.port}
    return {key: value for key, value in given.items() if value is not None}


def _check_package_roots() -> None:
    """PyPI has packages of our three names: refuse to run with one of them in the place of ours."""
    specs = {name: find_spec(name) for name in ("cluster", "replicas", "scheduler")}
    roots = {name: str(Path(spec.origin).parent.parent) for name, spec in specs.items() if spec and spec.origin}
    if len(roots) < len(specs) or len(set(roots.values())) != 1:
        found = ", ".join(f"{name} in {roots.get(name, 'no folder')}" for name in specs)
        raise UserError(f"the packages of SplitServe must lie in one folder, but Python finds {found}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitserve", description="LLM inference with prefill and decode on separate pools of replicas."
    )
    parser.add_argument("--version", action="version", version=f"splitserve {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the server and run until interrupted")
    check = commands.add_parser("check", help="check a config file and say what it would run, without starting it")
    file = "YAML file, such as configs/local.yaml"
    for command, what in ((serve, file), (check, f"{file}, or what `splitserve deploy` made of one")):
        command.add_argument("config", metavar="CONFIG", help=what)
        command.add_argument("--host", help="address to listen on, instead of the file's server.host")
        command.add_argument("--port", type=int, help="TCP port, instead of the file's server.port")
    deploy = commands.add_parser("deploy", help="print the Ray Serve config file that runs a config on a Ray cluster")
    deploy.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/local.yaml")
    deploy.add_argument("--output", type=Path, metavar="FILE", help="write it to this file, for `serve deploy FILE`")
    add_chat_options(commands.add_parser("chat", help="talk to a running server"))
    add_bench_options(commands.add_parser("bench", help="put a load on a running server and report how it fared"))
    simulate = commands.add_parser("simulate", help="replay a recorded load on the schedulers alone, without engines")
    simulate.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/local.yaml")
    add_simulate_options(simulate)
    add_fit_options(commands.add_parser("fit-steps", help="make a step time file for simulate from measured steps"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
