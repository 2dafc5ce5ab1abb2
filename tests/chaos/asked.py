"""What the clients of a run with faults ask for, each its own: greedy, seeded, several choices, JSON by a schema."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from tests.golden.golden_set import Golden, load_goldens, load_sampled_requests
from tests.server.generate import golden_request

Kind = Literal["greedy", "seeded", "choices", "schema"]

NUM_TOKENS = 48  # a stream of some seconds on two cores, so that each fault finds all of them open
_NUM_OF: dict[Kind, int] = {"greedy": 16, "seeded": 8, "choices": 4, "schema": 4}
_LONGEST_PROMPT = 128
_NUM_CHOICES = 3
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "is_capital": {"type": "boolean"}},
    {"colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 6}},
    {"title": {"type": "string", "maxLength": 30}, "pages": {"type": "integer", "minimum": 1, "maximum": 999}},
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One client's request, of which it sends one after another. golden: transformers' text, where it is kept."""

    name: str
    kind: Kind
    path: str
    body: dict[str, Any]
    golden: Golden | None = None

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


def all_asked() -> list[Asked]:
    """32 of them: 16 greedy, 8 seeded, 4 of three choices, 4 that follow a schema."""
    return [*_greedy(), *_sampled(), *_constrained()]


def some_asked(num: int) -> list[Asked]:
    """So many, of every kind in turn while there are any."""
    left = [[asked for asked in all_asked() if asked.kind == kind] for kind in _NUM_OF]
    found: list[Asked] = []
    while len(found) < num and any(left):
        found += [of_kind.pop(0) for of_kind in left if of_kind]
    return found[:num]


def _greedy() -> list[Asked]:
    """Prompts of many lengths; prefill computes the longer ones in more than one step."""
    goldens = sorted(load_goldens(), key=lambda golden: len(golden.prompt_ids))
    goldens = [golden for golden in goldens if len(golden.prompt_ids) <= _LONGEST_PROMPT]
    step = len(goldens) // _NUM_OF["greedy"]
    chosen = goldens[::step][: _NUM_OF["greedy"]]
    cut = [dataclasses.replace(golden, output_ids=golden.output_ids[:NUM_TOKENS]) for golden in chosen]
    return [Asked(golden.name, "greedy", *golden_request(golden, NUM_TOKENS), golden) for golden in cut]


def _sampled() -> list[Asked]:
    """Those of one choice as they are, and some with three."""
    requests = [request for request in load_sampled_requests() if request["top_k"] != 1 and request["top_p"] > 0.1]
    alone = [request for request in requests if request["n"] == 1][: _NUM_OF["seeded"]]
    others = [request for request in requests if request not in alone][: _NUM_OF["choices"]]
    return [
        *(_of_sampled("seeded", request) for request in alone),
        *(_of_sampled("choices", {**request, "n": _NUM_CHOICES}) for request in others),
    ]


def _of_sampled(kind: Kind, request: dict[str, Any]) -> Asked:
    body = {key: value for key, value in request.items() if key != "name"}
    body |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return Asked(request["name"], kind, "/v1/completions", body)


def _constrained() -> list[Asked]:
    found = []
    for number, properties in enumerate(_SCHEMAS):
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        body = {
            "messages": [{"role": "user", "content": f"Answer in JSON, with {' and '.join(properties)}."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            "temperature": 0,
            "max_tokens": 2 * NUM_TOKENS,
            "return_token_ids": True,
        }
        found.append(Asked(f"schema_{number}", "schema", "/v1/chat/completions", body))
    return found
