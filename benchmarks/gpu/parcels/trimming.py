"""Of installed packages, what this engine never loads: taken out, and libraries' symbols with it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

_ELF = b"\x7fELF"
# Parts of Ray that an application of Serve does not load.
RAY = ("ray/jars", "ray/rllib", "ray/tune", "ray/train", "ray/data", "ray/dashboard/client", "bin/py-spy")
# Of NIXL all but two ways of reading, and what the others stand on.
_NIXL_PLUGINS = ("libplugin_UCX.so", "libplugin_POSIX.so")
NIXL = (
    "nixl_ep_cu13",
    "include",
    "nixl_cu13.libs/ucx/libucx_perftest*",
    *(f"nixl_cu13.libs/{name}*" for name in ("libazure", "libaws", "libxml2", "libcurl", "libgusli", "libs2n")),
)
# For environments that a job may ask for: of those there are none.
OTHERS = ("virtualenv/seed/wheels/embed/*.whl", "**/tests", "**/__pycache__")


def trim(site: Path, patterns: Iterable[str]) -> None:
    """Deletes what the patterns name, unneeded plugins of NIXL, and symbols of all libraries and programs but NIXL's:
    those were patched after they were linked, and strip breaks them."""
    for pattern in patterns:
        for path in list(site.glob(pattern)):
            _delete(path)
    for plugin in list(site.glob("*nixl*/**/libplugin_*.so")):
        if plugin.name not in _NIXL_PLUGINS:
            plugin.unlink()
    if shutil.which("strip") is None:
        print("no strip here (binutils): libraries keep their symbols, and parts are larger", flush=True)
        return
    for path in site.rglob("*"):
        if path.is_file() and not path.is_symlink() and "nixl" not in str(path.relative_to(site)) and _is_elf(path):
            # What it does not know, a card's code, stays as it is.
            subprocess.run(["strip", "--strip-unneeded", path], capture_output=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ELF)) == _ELF
