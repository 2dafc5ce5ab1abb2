"""Bytes of a number, by the names that number types have in the config."""

from __future__ import annotations

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_NUMBER_BYTES = {**NUMBER_BYTES, "fp8": 1}
