"""The code that a model brings with it, where the config trusts it: part of what the model is."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from torch import nn

_PACKAGE = "transformers_modules."  # where transformers (5.24, dynamic_module_utils) puts it


def remote_code(model: nn.Module) -> bytes:
    """Digests of the files that it was loaded from, by name, with all that they import of each other; empty for a model
    of transformers' own. Reads files. Raises OSError."""
    modules = {type(part).__module__ for part in (*model.modules(), model.config)}
    packages = {name.rpartition(".")[0] + "." for name in modules if name.startswith(_PACKAGE)}
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(tuple(packages))]
    files = [Path(module.__file__) for module in loaded if module.__file__ is not None]
    contents = sorted((file.name, hashlib.sha256(file.read_bytes()).digest()) for file in files)
    return b"".join(name.encode() + digest for name, digest in contents)
