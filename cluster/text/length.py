"""How long texts are: bounded before they are tokenized, where they need not fit into the model's context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api_error import ApiError


def check_length(num_chars: int, most: int, param: str) -> None:
    """Raises ApiError 400 if the param's text has more than most characters."""
    if num_chars > most:
        message = f"{param}: the text has {num_chars} characters; at most {most} are tokenized to be counted or cut"
        raise ApiError(400, message, param=param, code="text_too_long")


def size_up_to(value: Any, most: int) -> int:
    """Characters and items in nested lists and objects; what is beyond most is not looked at."""
    size, open_values = 0, [value]
    while open_values and size <= most:
        item = open_values.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            size += len(item)
            open_values += item.values() if size <= most else ()
        elif isinstance(item, list):
            size += len(item)
            open_values += item if size <= most else ()
    return size
