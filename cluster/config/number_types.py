"""Bytes of a number, by the names that number types have in the config."""

from __future__ import annotations

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_NUMBER_BYTES = {**NUMBER_BYTES, "fp8": 1}
# Of a weight that is rounded at load, with its part of a scale: one of an output's, or of 64 (and a zero point).
ROUNDED_BYTES = {"fp8": 1.005, "int8": 1.005, "int4": 0.5 + 5 / 64}
