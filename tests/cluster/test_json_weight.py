"""What the bytes of a JSON document tell about it, against a parser's answer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.json_weight import num_values_beyond
from cluster.openai_body import parse_body
from cluster.openai_request import CompletionBody
from cluster.service_config import LimitsConfig


def weight(value: Any) -> int:
    """By the definition: strings, keys, objects and arrays, and a sixteenth of the commas."""
    commas = 0

    def count(item: Any) -> int:
        nonlocal commas
        if isinstance(item, dict | list):
            commas += max(0, len(item) - 1)
            parts = [*item, *item.values()] if isinstance(item, dict) else item
            return 1 + sum(map(count, parts))
        return int(isinstance(item, str))

    return count(value) + commas // 16


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6) if depth else rng.randrange(4)
    if kind == 4:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(9))]
    if kind == 5:
        return {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.randrange(9))}
    return [None, rng.randrange(10**6), True, random_text(rng)][kind]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice('a"\\[{,:]}\n/é') for _ in range(rng.randrange(12)))


@pytest.mark.parametrize("seed", range(5))
def test_random_documents(seed: int) -> None:
    rng = random.Random(seed)
    num_beyond = 0
    for _ in range(200):
        value = [random_value(rng, 4) for _ in range(20)]
        raw, true = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(), weight(value)
        assert num_values_beyond(raw, true) is None
        assert num_values_beyond(raw, true + 1) is None
        got = num_values_beyond(raw, true - 1)
        assert got is not None
        num_beyond += got == true
    # Strings alone may already be too many: then the rest is not looked at.
    assert num_beyond > 20


@pytest.mark.parametrize("prompt", ['{"a": [1, "b"]}, ' * 50_000, "," * 1_000_000, "[" * 100_000, '\\"' * 100_000])
def test_a_long_text_of_anything_is_one_value(prompt: str) -> None:
    body = parse_body(json.dumps({"prompt": prompt}).encode(), None, CompletionBody, LimitsConfig())
    assert body.prompt == [prompt]


@pytest.mark.parametrize("value", [["a"] * 70_000, [{}] * 70_000, [[]] * 70_000, [1] * 1_100_000, ["\\\\"] * 70_000])
def test_too_many_values_are_refused_by_number(value: list[Any]) -> None:
    with pytest.raises(ApiError, match=r"(6|7|14)\d{4} values") as caught:
        parse_body(json.dumps({"x": value}).encode(), None, CompletionBody, LimitsConfig())
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


def test_half_a_million_ids_are_fine() -> None:
    ids = [12_345] * 524_288
    assert parse_body(json.dumps({"prompt": ids}).encode(), None, CompletionBody, LimitsConfig()).prompt == [ids]
