"""`python -m benchmarks.simulation WHAT`: tables from the simulator. No engine runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.simulation import pairs
from benchmarks.simulation.admission import admission_table, compare_admission
from benchmarks.simulation.autoscaling import (
    SCENARIOS,
    TRACES,
    autoscaling_table,
    compare_autoscaling,
    plot_autoscaling,
)
from benchmarks.simulation.bursts import bursts_table, compare_bursts
from benchmarks.simulation.drafts import BATCHES, KINDS, compare_drafts
from benchmarks.simulation.h100_system import AZURE_CONVERSATION, MOONCAKE_CONVERSATION
from benchmarks.simulation.lanes import LOADS, RULES, SimulatedCard, print_measured, print_rule, with_noise
from benchmarks.simulation.parts import STEP_TOKENS, compare_parts
from benchmarks.simulation.prefix_setups import SETUPS, compare_prefix_routing, prefix_routing_table
from benchmarks.simulation.roles import LOADS as ROLE_LOADS
from benchmarks.simulation.roles import layouts_of, print_goodputs
from benchmarks.simulation.scale import measure_scale, plot_scale, scale_table
from cluster.load.machine import describe_machine, machine_line
from cluster.simulation.plot import check_can_plot
from scheduler.lane_split import LaneObjectives, LaneShare, estimated_shares

WITH_TRACE = ("admission", "scale", "autoscaling", "prefixes")


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.simulation", description=__doc__)
    parser.add_argument("--trace", type=Path, default=AZURE_CONVERSATION, help="default: Azure's conversations")
    parser.add_argument("--output", type=Path, help="JSON file")
    what = parser.add_subparsers(dest="what", required=True)
    admission = what.add_parser("admission", help="projected memory against free blocks now")
    admission.add_argument("--rate-scale", type=float, default=4.0)
    admission.add_argument("--duration-s", type=float, default=600.0)
    admission.add_argument("--kv-tokens", type=int, default=65_536, help="KV cache of the decode replica")
    scale = what.add_parser("scale", help="1 to 1,000 decode replicas")
    scale.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    scale.add_argument("--requests", type=int, default=40_000, help="of each run with the same load for each replica")
    scale.add_argument("--no-spread", action="store_true", help="leave out the hour spread over all replicas")
    scale.add_argument("--plot", type=Path, help="image file")
    autoscaling = what.add_parser("autoscaling", help="the shipped policy against Serve's default and static splits")
    autoscaling.add_argument("--duration-s", type=float, default=3600.0, help="of each trace")
    autoscaling.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces")
    every = range(len(SCENARIOS))
    autoscaling.add_argument("--only", type=int, nargs="+", default=every, choices=every, help="of the scenarios")
    autoscaling.add_argument("--plot", type=Path, help="image file")
    what.add_parser("bursts", help="bursts that order replicas: refused meanwhile, waiting, moving")
    prefixes = what.add_parser("prefixes", help="routing by what prefix caches hold, on Mooncake's conversations")
    prefixes.add_argument("--only", type=int, nargs="+", default=range(len(SETUPS)), help="of the setups, from 0")
    lanes = what.add_parser("lanes", help="two lanes on one H200: a table of shares, and a rule that chooses")
    lanes.add_argument("--measured", action="store_true", help="the runs on a card that it has to give back")
    lanes.add_argument("--shares", type=_share, nargs="+", default=estimated_shares(132), metavar="PROCESSORS:P:D")
    lanes.add_argument("--rule", choices=RULES, default="shipped")
    lanes.add_argument("--ttft-s", type=float, default=0.4)
    lanes.add_argument("--token-gap-s", type=float, default=0.011)
    lanes.add_argument("--noise", type=float, default=0.0, help="of both rates, as a part; by the first seed")
    lanes.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    lanes.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    drafts = what.add_parser("drafts", help="tokens guessed ahead on one H200: what is chosen, beside fixed numbers")
    drafts.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    drafts.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parts = what.add_parser("parts", help="a long prompt's handoff in parts: its second token")
    parts.add_argument("--prompt-tokens", type=int, default=32_768)
    parts.add_argument("--step-tokens", type=int, nargs="+", default=STEP_TOKENS)
    pair = what.add_parser("pairs", help="two H200s: what a campaign measured and what one will, simulated")
    pair.add_argument("--forecast", action="store_true", help="goodputs with the engine of now, in place of the runs")
    pair.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    roles = what.add_parser(
        "roles", help="cards that do both phases, beside every fixed split, colocation and two lanes"
    )
    roles.add_argument("--cards", type=int, default=2)
    roles.add_argument("--loads", nargs="+", default=list(ROLE_LOADS), choices=ROLE_LOADS)
    roles.add_argument("--layouts", nargs="+", metavar="NAME", help="of those in the table; default: all")
    roles.add_argument("--part", type=float, default=1.0, help="of the time that loads last")
    roles.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    traces = [options.trace] if options.what in WITH_TRACE else []
    if options.what == "prefixes" and options.trace == AZURE_CONVERSATION:
        traces = [MOONCAKE_CONVERSATION]
    if options.what == "autoscaling":
        traces = [options.traces / SCENARIOS[index].trace for index in options.only]
    if missing := [str(trace) for trace in traces if not trace.is_file()]:
        parser.error(f"no such trace: {', '.join(missing)}; docs/simulator.md says where the public ones are")
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    runs = {
        "admission": _admission,
        "scale": _scale,
        "autoscaling": _autoscaling,
        "bursts": _bursts,
        "prefixes": _prefixes,
        "lanes": _lanes,
        "drafts": _drafts,
        "parts": _parts,
        "pairs": _pairs,
        "roles": _roles,
    }
    run = runs[options.what]
    if traces:
        options.trace = traces[0]
    result = run(options)
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, options.what: result}, indent=1) + "\n")
    return 0


def _admission(options: argparse.Namespace) -> dict[str, Any]:
    result = compare_admission(options.trace, options.rate_scale, options.duration_s, options.kv_tokens, _say)
    print(admission_table(result))
    return result


def _scale(options: argparse.Namespace) -> dict[str, Any]:
    if options.plot:
        check_can_plot()
    results = [
        measure_scale(options.trace, options.replicas, options.requests, is_spread, _say)
        for is_spread in ([False] if options.no_spread else [False, True])
    ]
    for result in results:
        print("the trace spread over all replicas" if result["is_spread"] else "the same load for each replica")
        print(scale_table(result))
    if options.plot:
        plot_scale(results, options.plot)
    return {"runs": results}


def _autoscaling(options: argparse.Namespace) -> dict[str, Any]:
    if options.plot:
        check_can_plot()
    results = [
        compare_autoscaling(SCENARIOS[index], options.traces, options.duration_s, _say) for index in options.only
    ]
    print(autoscaling_table(results))
    if options.plot:
        plot_autoscaling(results, options.plot)
    return {"runs": results}


def _bursts(options: argparse.Namespace) -> dict[str, Any]:
    result = compare_bursts(_say)
    print(bursts_table(result["rows"]))
    return result


def _prefixes(options: argparse.Namespace) -> dict[str, Any]:
    result = compare_prefix_routing(options.trace, options.only, _say)
    print(prefix_routing_table(result))
    return result


def _pairs(options: argparse.Namespace) -> dict[str, Any]:
    said, say = _saying()
    (pairs.print_forecast if options.forecast else pairs.print_measured)(options.loads, say)
    return {"lines": said}


def _roles(options: argparse.Namespace) -> dict[str, Any]:
    said, say = _saying()
    layouts = [of for of in layouts_of(options.cards) if options.layouts is None or of.name in options.layouts]
    print_goodputs(options.cards, options.loads, layouts, options.seeds, options.part, say)
    return {"lines": said}


def _lanes(options: argparse.Namespace) -> dict[str, Any]:
    said, say = _saying()
    say("TTFT p50 / p90 | TPOT p90 | ITL p99, ms")
    if options.measured:
        print_measured(say)
        return {"lines": said}
    shares = with_noise(options.shares, options.noise, options.seeds[0]) if options.noise else options.shares
    objectives = LaneObjectives(options.ttft_s, options.token_gap_s)
    print_rule(SimulatedCard(shares, objectives, RULES[options.rule]), options.seeds, options.loads, say)
    return {"lines": said}


def _drafts(options: argparse.Namespace) -> dict[str, Any]:
    return compare_drafts(options.kinds, options.batches, _say)


def _parts(options: argparse.Namespace) -> dict[str, Any]:
    return compare_parts(options.prompt_tokens, options.step_tokens, _say)


def _share(text: str) -> LaneShare:
    processors, prefill_rate, decode_rate = text.split(":")
    return LaneShare(int(processors), float(prefill_rate), float(decode_rate))


def _saying() -> tuple[list[str], Callable[[str], None]]:
    """Lines that were said, and what says them."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        _say(line)

    return said, say


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
