"""What a module of pieces does as a command: run the named one, and print what it found as a JSON line, last."""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Piece = Callable[[argparse.Namespace], dict[str, Any]]


def piece_options(pieces: Iterable[str], description: str | None) -> argparse.Namespace:
    """The arguments of this process: `piece` is one of these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=list(pieces))
    parser.add_argument("--shape", type=Path, required=True, help="config.json of a model")
    parser.add_argument("--tokenizer", type=Path, help="where a piece needs one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()


def run_named(pieces: Mapping[str, Piece], description: str | None) -> None:
    """By the arguments of this process. Blocks. Raises what the piece raises."""
    options = piece_options(pieces, description)
    torch.set_num_threads(4)
    found = pieces[options.piece](options)
    gc.collect()
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's processes may be waited for until somebody ends this one
