"""A tokenizer without torch: transformers imports it wherever it is installed, and the ingress has no use for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_torch() -> Iterator[None]:
    """What is imported inside finds no torch, and transformers does without it from then on.

    For a process that will never run a model: with transformers 5.24, 2.9 s less CPU and 230 MB less memory. Does
    nothing where torch has been imported already. Not thread-safe: nothing else may import torch meanwhile.
    """
    if "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch is meant
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's own mark for "not to be found"
    try:
        yield
    finally:
        del sys.modules["torch"]
