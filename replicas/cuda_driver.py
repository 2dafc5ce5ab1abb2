"""Calls of a card's driver, for what torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARY = "libcuda.so.1"


class CudaDriver:
    """What goes wrong is raised as one kind of exception, the caller's own."""

    def __init__(self, error: type[Exception], needs: str, library: Any = None) -> None:
        """needs: the oldest CUDA that has all that is going to be called. library: libcuda, as ctypes has it; None: it
        is loaded. Raises `error`."""
        self._error, self._needs = error, needs
        try:
            self._library = library or ctypes.CDLL(_LIBRARY)
        except OSError as cause:
            raise error(f"{_LIBRARY} can't be loaded: {cause}") from cause

    def call(self, name: str, *arguments: Any) -> None:
        """arguments: ctypes' own. Raises `error`, with the call and the driver's words."""
        try:
            function = getattr(self._library, name)
        except AttributeError as cause:
            raise self._error(f"the driver has no {name}: it is older than CUDA {self._needs}") from cause
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise self._error(f"{name}: error {code}, {(text.value or b'unknown').decode()}")
