"""The options of `splitserve simulate` and `splitserve fit-steps`. Loads nothing of the simulator."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """The options of `splitserve simulate CONFIG`."""
    parser.add_argument("--trace", type=Path, required=True, help="an Azure .csv or Mooncake .jsonl file")
    parser.add_argument(
        "--steps",
        type=Path,
        required=True,
        help="JSON file of step times, such as benchmarks/step_times/llama-3.1-8b-h100.json; "
        "`splitserve fit-steps` makes one from measured steps",
    )
    parser.add_argument(
        "--replicas", type=int, nargs=2, metavar=("P", "D"), help="prefill and decode replicas; colocated: 0 D"
    )
    parser.add_argument(
        "--kv-tokens", type=int, nargs=2, metavar=("P", "D"), help="KV cache of each replica, instead of the config's"
    )
    parser.add_argument("--rate-scale", type=float, default=1.0, help="times as many arrivals, in the same time")
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor on prompts and outputs")
    parser.add_argument("--max-requests", type=int, help="only the first so many arrivals")
    parser.add_argument("--duration-s", type=float, help="only the first so many seconds of the trace")
    parser.add_argument(
        "--max-tokens", type=int, help="what every client asks for; its answer still ends where the trace says"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the copies that --rate-scale makes")
    parser.add_argument(
        "--acceptance",
        type=_probability,
        nargs=2,
        default=(0.0, 0.0),
        metavar=("FIRST", "FURTHER"),
        help="how often the first token that is guessed ahead is right, and one behind another that was; with a config "
        "whose speculative.method is not none",
    )
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits on ttft, tpot, e2el")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="write a picture to this file (.png, .svg, .pdf)")
    parser.add_argument("--step-by-step", action="store_true", help="take every decode step singly: slow, same result")


def _probability(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is no probability: expected 0 to 1")
    return value


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """The options of `splitserve fit-steps`."""
    parser.add_argument("records", type=Path, help="folder of step records (config key testing.step_record_dir)")
    parser.add_argument("--kv-bytes-per-token", type=int, required=True, help="as the server says when it is ready")
    parser.add_argument(
        "--kv-dtype",
        choices=["float32", "bfloat16", "float16", "fp8"],
        default="bfloat16",
        help="number type of the KV cache there: model.dtype, or fp8 with kv.dtype: fp8",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file for `splitserve simulate --steps`")
