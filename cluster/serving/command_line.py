"""The command `splitserve`. Checks the config before anything slow (Ray, torch) is imported."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.client.chat_command import add_chat_options, run_chat
from cluster.config.file import config_of, load_config, load_for_elsewhere
from cluster.config.root import Config
from cluster.config.summary import summarize
from cluster.config.yaml_document import YamlError, parse_yaml
from cluster.launch.machine_probe import look_at_machine
from cluster.launch.start import Start, plan_start, ready_to_serve
from cluster.load.command_options import add_bench_options
from cluster.serving.package_roots import check_package_roots
from cluster.serving.serve_config import as_yaml, config_values, serve_config
from cluster.serving.start_options import add_start_options, typed
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
    served = _of_serve_config(arguments.what) if arguments.command == "check" else None
    if served is not None:  # for other machines: what this one has does not matter
        print(summarize(config_of(served)))
        print("ok")
        return 0
    start = plan_start(typed(arguments), look_at_machine(os.environ))
    for warning in start.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.print_config:
        sys.stdout.write(start.as_yaml())
        return 0
    if arguments.command == "check":
        print(summarize(start.config))
        print(f"{'memory':<9} {start.memory}")
        print("ok")
        return 0
    check_package_roots(Path.cwd())
    return _serve(start)


def _of_serve_config(path: str | None) -> dict[str, Any] | None:
    """The values of a Serve config file; None if the file is another, or can't be read: whoever loads it says why."""
    try:
        return config_values(parse_yaml(Path(path).read_text(encoding="utf-8")).values) if path else None
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


def _serve(start: Start) -> int:
    _check_node_labels(start.config)
    if start.chosen:
        print(f"{start.chosen}\n  change any of it: --set KEY=VALUE; as a file: --print-config", file=sys.stderr)
    config = ready_to_serve(start)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitserve", description="LLM inference with prefill and decode on separate pools of replicas."
    )
    parser.add_argument("--version", action="version", version=f"splitserve {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the server and run until interrupted")
    check = commands.add_parser("check", help="say what serve would run, or what is wrong with it, and start nothing")
    add_start_options(serve)
    add_start_options(check)
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
