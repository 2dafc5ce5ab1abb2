"""What a schema adds to the time until the first token, over HTTP: one that was seen before, and a new one.

Answers of one token to one prompt, which the prefix cache knows, one request at a time. Each round asks four times, in
an order of its own: twice without a schema, with one that was seen, with a new one. What a schema adds is the
difference to the mean of the two without within a round; the difference of these two is noise. A first token of the
bundled model takes some 80 ms, whose noise is more than a seen schema may add: so the same is asked of a server whose
model has one of its thirty layers, and is the same otherwise: tokenizer, vocabulary, and with these the work for masks.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from benchmarks.grammars.short_model import save_short_model
from benchmarks.grammars.verdict import Figure, share_figure
from benchmarks.real_server import real_server
from cluster.load.percentile import percentile

_ROOT = Path(__file__).parents[2]
_SCHEMAS = _ROOT / "tests" / "golden" / "schemas.json"
_PATH, _HEADERS = "/v1/chat/completions", {"Content-Type": "application/json"}
_PROMPT = "Tell me of the numbers that you like."
_NUM_SEEN = 20  # schemas
_WARM_UP_ROUNDS = 2 * _NUM_SEEN
_MOST_SEEN_MS, _MOST_NEW_MS, _MOST_NEW_P99_MS = 0.3, 5.0, 20.0
_KINDS = ("plain", "again", "seen", "new")


def first_token_figures(num_rounds: int, num_short_rounds: int) -> list[Figure]:
    """num_short_rounds: with the model of one layer. Starts and stops two servers. Blocks for some minutes. Raises
    RuntimeError for an answer that is none."""
    config = yaml.safe_load((_ROOT / "configs" / "local.yaml").read_text())
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        save_short_model(model, num_layers=1)
        short = {**config, "model": {**config["model"], "source": str(model)}}
        return [
            *_figures("one layer", short, Path(name), num_short_rounds),
            *_figures("whole model", config, Path(name), num_rounds),
        ]


def _figures(model: str, config: dict[str, Any], folder: Path, num_rounds: int) -> list[Figure]:
    with real_server(config, folder) as url:
        rounds = _rounds(url, num_rounds)
    noise = [times["again"] - times["plain"] for times in rounds]
    seen, new = ([times[kind] - (times["plain"] + times["again"]) / 2 for times in rounds] for kind in ("seen", "new"))
    plain_ms = percentile([times["plain"] for times in rounds], 50)
    return [
        Figure(f"{model}: without a schema, p50", plain_ms, "ms"),
        share_figure(f"{model}: noise, added by nothing", noise, 50, "ms"),
        share_figure(f"{model}: noise, added by nothing", noise, 99, "ms"),
        share_figure(f"{model}: added by a seen schema", seen, 50, "ms", _MOST_SEEN_MS, noise),
        share_figure(f"{model}: added by a new schema", new, 50, "ms", _MOST_NEW_MS, noise),
        share_figure(f"{model}: added by a new schema", new, 99, "ms", _MOST_NEW_P99_MS, noise),
    ]


def _rounds(url: str, num_rounds: int) -> list[dict[str, float]]:
    """Milliseconds by kind."""
    schemas: list[dict[str, Any]] = json.loads(_SCHEMAS.read_text())
    rng = random.Random(7)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    rounds = []
    for number in range(_WARM_UP_ROUNDS + num_rounds):
        new = {**schemas[number % len(schemas)], "title": f"{number} of this run"}  # nobody has compiled it
        given = {"plain": None, "again": None, "seen": schemas[number % _NUM_SEEN], "new": new}
        times = {kind: _ask(connection, given[kind]) for kind in rng.sample(_KINDS, len(_KINDS))}
        if number >= _WARM_UP_ROUNDS:
            rounds.append(times)
    connection.close()
    return rounds


def _ask(connection: http.client.HTTPConnection, schema: dict[str, Any] | None) -> float:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 1, "temperature": 0}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    text = json.dumps(body)
    started_s = time.perf_counter()
    connection.request("POST", _PATH, text, _HEADERS)
    response = connection.getresponse()
    answer = response.read()
    duration_ms = 1e3 * (time.perf_counter() - started_s)
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer[:300].decode(errors='replace')}")
    return duration_ms
