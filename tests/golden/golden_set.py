"""The golden outputs of transformers' generate, as data, and how to judge generated ids against them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scheduler.beam_search import BeamParams
from tests.golden.beam_case import BeamCase
from tests.golden.compare import Mismatch, NearTie, first_difference
from tests.model_folder import model_folder

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt and what the reference generates from it: greedy, float32, 64 tokens, not ended by EOS."""

    name: str
    kind: str  # "text" | "chat" | "ids"
    source: Any  # text, messages or ids
    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]

    @property
    def text(self) -> str:
        """The output as a client gets it: without control tokens."""
        text: str = _reference_tokenizer().decode(self.output_ids, skip_special_tokens=True)
        return text

    def check(self, got_ids: list[int]) -> NearTie | None:
        """Fail the test on a difference, but for one at a near tie of the reference: that is returned."""
        difference = first_difference(self.output_ids, self.margins, got_ids)
        assert not isinstance(difference, Mismatch), (
            f"{self.name}: differs from transformers at token {difference.index}: "
            f"{got_ids[difference.index : difference.index + 5]} instead of "
            f"{self.output_ids[difference.index : difference.index + 5]}"
        )
        return difference


@cache
def _reference_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder())


def load_goldens() -> list[Golden]:
    entries = json.loads((_FOLDER / "golden.json").read_text())["entries"]
    return [
        Golden(
            entry["name"],
            entry["kind"],
            entry.get("text", entry.get("messages", entry["prompt_ids"])),
            entry["prompt_ids"],
            entry["output_ids"],
            entry["margins"],
        )
        for entry in entries
    ]


@dataclass(frozen=True, slots=True)
class BeamGolden:
    """One beam search and what the reference finds: its texts, stop tokens included, the best first."""

    case: BeamCase
    texts: list[list[int]]


def load_beam_goldens() -> list[BeamGolden]:
    """The same 20 prompts under one search after another."""
    prompts = {golden.name: tuple(golden.prompt_ids) for golden in load_goldens()}
    entries = json.loads((_FOLDER / "beam_golden.json").read_text())["entries"]
    return [
        BeamGolden(
            BeamCase(
                prompts[entry["name"]],
                BeamParams(entry["width"], entry["length_penalty"], entry["early_stopping"]),
                entry["width"],
                entry["max_tokens"],
                frozenset(entry["stop_token_ids"]),
            ),
            entry["texts"],
        )
        for entry in entries
    ]


def load_sampled_requests() -> list[dict[str, Any]]:
    """Requests with sampling; their outputs are compared between layouts."""
    requests: list[dict[str, Any]] = json.loads((_FOLDER / "sampled_requests.json").read_text())["requests"]
    return requests
