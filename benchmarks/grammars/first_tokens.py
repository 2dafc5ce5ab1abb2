"""What a schema adds to the time until the first token, over HTTP: one that was seen before, and a new one.

Answers of one token, one request at a time. Each round asks four times for the same prompt, in an order of its own:
twice without a schema, with one that was seen, with a new one. What a schema adds is the difference within a round;
that of the two without one says how much of it is noise.
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

from benchmarks.grammars.verdict import Figure
from benchmarks.real_server import real_server
from cluster.load.percentile import percentile

_ROOT = Path(__file__).parents[2]
_SCHEMAS = _ROOT / "tests" / "golden" / "schemas.json"
_PATH, _HEADERS = "/v1/chat/completions", {"Content-Type": "application/json"}
_NUM_WARM_UP = 5
_MOST_SEEN_MS, _MOST_NEW_MS, _MOST_NEW_P99_MS = 0.3, 5.0, 20.0
_KINDS = ("plain", "again", "seen", "new")


def first_token_figures(num_rounds: int) -> list[Figure]:
    """Starts and stops a server. Blocks for some minutes. Raises RuntimeError for an answer that is none."""
    config = yaml.safe_load((_ROOT / "configs" / "local.yaml").read_text())
    with tempfile.TemporaryDirectory() as folder, real_server(config, Path(folder)) as url:
        rounds = _rounds(url, num_rounds)
    plain_ms = percentile([times["plain"] for times in rounds], 50)
    told = f"{num_rounds} rounds; without a schema p50 {plain_ms:.1f} ms"
    added = {kind: [times[kind] - times["plain"] for times in rounds] for kind in _KINDS[1:]}
    return [
        Figure("noise: added by nothing, p50", percentile(added["again"], 50), "ms", None, told),
        Figure("noise: added by nothing, p99", percentile(added["again"], 99), "ms", None, told),
        Figure("added by a seen schema, p50", percentile(added["seen"], 50), "ms", _MOST_SEEN_MS, told),
        Figure("added by a new schema, p50", percentile(added["new"], 50), "ms", _MOST_NEW_MS, told),
        Figure("added by a new schema, p99", percentile(added["new"], 99), "ms", _MOST_NEW_P99_MS, told),
    ]


def _rounds(url: str, num_rounds: int) -> list[dict[str, float]]:
    """Milliseconds by kind."""
    schemas: list[dict[str, Any]] = json.loads(_SCHEMAS.read_text())
    rng = random.Random(7)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    rounds = []
    for number in range(_NUM_WARM_UP + num_rounds):
        schema = schemas[number % len(schemas)]
        new = {**schema, "title": f"{number} of this run"}  # nobody has compiled it
        given = {"plain": None, "again": None, "seen": schemas[0], "new": new}
        times = {}
        for kind in rng.sample(_KINDS, len(_KINDS)):
            times[kind] = _ask(connection, f"Tell me of the number {number}.", given[kind])
        if number >= _NUM_WARM_UP:
            rounds.append(times)
    connection.close()
    return rounds


def _ask(connection: http.client.HTTPConnection, prompt: str, schema: dict[str, Any] | None) -> float:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "temperature": 0}
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
