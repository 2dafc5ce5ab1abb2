"""What the bytes of a JSON document tell about it, against a parser's answer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.config.limits import LimitsConfig
from cluster.openai import json_cost
from cluster.openai.body import parse_body
from cluster.openai.json_cost import has_more_values
from cluster.openai.request import CompletionBody


def weight(value: Any) -> int:
    """By the definition, in sixteenths: strings, keys, objects and arrays, and commas."""
    if isinstance(value, dict | list):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return 16 + max(0, len(value) - 1) + sum(map(weight, parts))
    return 16 * isinstance(value, str)


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
@pytest.mark.parametrize("piece", [7, 1000, 2**18])
def test_random_documents(seed: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_cost, "_PIECE", piece)
    rng = random.Random(seed)
    for _ in range(100):
        value = [random_value(rng, 4) for _ in range(20)]
        raw, most = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=(",", ":")).encode(), weight(value)
        assert [has_more_values(raw, most // 16 + extra) for extra in (-2, -1, 0, 1)] == [
            16 * (most // 16 + extra) < most for extra in (-2, -1, 0, 1)
        ]


@pytest.mark.parametrize("prompt", ['{"a": [1, "b"]}, ' * 50_000, "," * 1_000_000, "[" * 100_000, '\\"' * 100_000])
def test_a_long_text_of_anything_is_one_value(prompt: str) -> None:
    body = parse_body(json.dumps({"prompt": prompt}).encode(), None, CompletionBody, LimitsConfig())
    assert body.prompt == [prompt]


@pytest.mark.parametrize("value", [["a"] * 70_000, [{}] * 70_000, [[]] * 70_000, [1] * 1_100_000, ["\\\\"] * 70_000])
def test_too_many_values_are_refused(value: list[Any]) -> None:
    with pytest.raises(ApiError, match="more than 65536 values") as caught:
        parse_body(json.dumps({"x": value}).encode(), None, CompletionBody, LimitsConfig())
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


def test_half_a_million_ids_are_fine() -> None:
    ids = [12_345] * 524_288
    assert parse_body(json.dumps({"prompt": ids}).encode(), None, CompletionBody, LimitsConfig()).prompt == [ids]
