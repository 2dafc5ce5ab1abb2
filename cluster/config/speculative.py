"""How tokens are drafted: guessed ahead, and kept where the model itself chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.conflicts import Conflict
from cluster.config.model import SourceKind, source_kind
from cluster.config.pool import PoolsConfig
from cluster.config.section import Section, absolute_path, base_dir_of

_MODEL_METHODS = ("draft_model", "eagle3")


class SpeculativeConfig(Section):
    """Tokens that are guessed ahead and computed in one step: the text stays the same, whatever is guessed."""

    method: Literal["none", "grammar", "ngram", "draft_model", "eagle3"] = Field(
        default="none",
        description="Who guesses. none: nobody. grammar: of an answer that must follow one, what this leaves no choice "
        "about, and nothing else; on CPUs the others below do that, too. ngram: the text itself, what followed the "
        "last time that it stood as it stands now; for answers that repeat their prompt. draft_model: a small model "
        "of the same tokenizer. eagle3: a head that was trained for this model. How many are guessed in a step is "
        "chosen by what pays, none if nothing does",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description='The small model, or the head: a folder with a config.json, or a Hub id "org/name". Only with '
        "draft_model and eagle3. A relative path counts from the config file's folder and starts with ./ or ../",
    )
    max_drafts: Literal[2, 4, 7] = Field(default=7, description="Most tokens guessed for one sequence in a step")
    ngram_min: int = Field(
        default=2, ge=1, le=16, description="ngram: so many tokens at least must have stood together before"
    )
    ngram_max: int = Field(default=4, ge=1, le=16, description="ngram: no more than so many are looked for")

    @field_validator("model")
    @classmethod
    def _find_model(cls, model: str | None, info: ValidationInfo) -> str | None:
        if model is None:
            return None
        kind = source_kind(model)
        if kind in (SourceKind.BUNDLED, SourceKind.GGUF):
            raise ValueError('can\'t draft; expected a folder with a config.json, or a Hub id "org/name"')
        if kind is SourceKind.HUB:
            return model
        folder = absolute_path(Path(model), info)
        if base_dir_of(info) is not None and not folder.joinpath("config.json").is_file():
            found = "has no config.json" if folder.is_dir() else "does not exist"
            raise ValueError(
                f'{found} (looked for {folder}); expected a folder with a config.json, or a Hub id "org/name"'
            )
        return str(folder)

    @property
    def drafts_by_model(self) -> bool:
        """Whether it needs one more model."""
        return self.method in _MODEL_METHODS


def speculative_conflicts(speculative: SpeculativeConfig, layout: str, pools: PoolsConfig) -> Iterator[Conflict]:
    key, reads = "speculative.model", ("speculative.model", "speculative.method")
    method, model = speculative.method, speculative.model
    if speculative.drafts_by_model and model is None:
        which = "the small model" if method == "draft_model" else "the head"
        yield Conflict(key, f"missing; method {method} needs {which}: a folder, or a Hub id", reads)
    if not speculative.drafts_by_model and model is not None:
        reason = f"{model} is of no use with method {method}; remove it, or set method: draft_model or eagle3"
        yield Conflict(key, reason, reads)
    key, around = "speculative.method", ("speculative.method", "layout", "pools")
    if method == "eagle3" and layout == "two_lanes":
        reason = "eagle3 needs prompts and answers in the same lane; set layout: colocated or split, or method: ngram"
        yield Conflict(key, reason, around)
    if method == "grammar" and any(pool.device == "cuda" for pool in pools.deployed().values()):
        yield Conflict(key, "grammar is for CPUs so far; with device cuda set another one, or none", around)
    if speculative.ngram_min > speculative.ngram_max:
        reason = (
            f"{speculative.ngram_min} is more than speculative.ngram_max, {speculative.ngram_max}; expected at most "
        )
        yield Conflict("speculative.ngram_min", reason + "that", ("speculative.ngram_min", "speculative.ngram_max"))
