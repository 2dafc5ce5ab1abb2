"""Make beam_golden.json: what transformers' own beam search finds, in float32, for 20 prompts of golden.json.

Run from the repository root; it takes about five minutes on one CPU core, and goes on where it was stopped:

    HF_HUB_OFFLINE=1 python tests/golden/make_beam_golden.py

beam_golden.json: {"versions", "entries": [entry, ...]}, one entry a line:

    name             of the prompt in golden.json
    width, length_penalty, early_stopping, max_tokens, stop_token_ids     the search
    texts            token ids of its `width` best texts, the best first; a stop token is the last one
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from scheduler.beam_search import BeamParams  # noqa: E402
from tests.golden.beam_case import BeamCase  # noqa: E402
from tests.golden.beam_reference import reference_texts  # noqa: E402
from tests.golden.golden_set import Golden, load_goldens  # noqa: E402
from tests.model_folder import model_folder  # noqa: E402

WIDTH, MAX_TOKENS = 4, 20
EOS = 2
OFTEN = [EOS, 28, 30, 198]  # comma, full stop and newline too: texts end early, and at different lengths
SEARCHES = [
    (BeamParams(WIDTH), [EOS]),
    (BeamParams(WIDTH), OFTEN),
    (BeamParams(WIDTH, length_penalty=0.5), OFTEN),
    (BeamParams(WIDTH, length_penalty=2.0), OFTEN),
    (BeamParams(WIDTH, early_stopping=True), OFTEN),
    (BeamParams(WIDTH, early_stopping="never"), OFTEN),
]


def chosen_prompts() -> list[Golden]:
    goldens = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 60]
    texts = [golden for golden in goldens if golden.kind == "text"]
    chats = [golden for golden in goldens if golden.kind == "chat"]
    return [*texts[:12], *chats[:8]]


def entry_of(model: Any, golden: Golden, params: BeamParams, stops: list[int]) -> dict[str, Any]:
    case = BeamCase(tuple(golden.prompt_ids), params, params.width, MAX_TOKENS, frozenset(stops))
    return {
        "name": golden.name,
        "width": params.width,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
        "max_tokens": MAX_TOKENS,
        "stop_token_ids": stops,
        "texts": list(reference_texts(model, case).values()),
    }


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    head = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    path.write_text(json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    path = HERE / "beam_golden.json"
    partial = path.with_suffix(".partial.json")
    entries = json.loads(partial.read_text(encoding="utf-8"))["entries"] if partial.exists() else []
    wanted = [(golden, *search) for search in SEARCHES for golden in chosen_prompts()]
    for number, (golden, params, stops) in enumerate(wanted[len(entries) :], len(entries) + 1):
        entries.append(entry_of(model, golden, params, stops))
        write(partial, entries)
        print(f"{number}/{len(wanted)} {golden.name} {params}", flush=True)
    write(path, entries)
    partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
