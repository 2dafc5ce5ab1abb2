"""What a schema adds to the time until the first token, over HTTP: one that was seen before, and a new one.

Answers of one token to one prompt, which the prefix cache knows, one request at a time. Each round asks four times, in
an order of its own: twice without a schema, with one that was seen, with a new one. What a schema adds is the
difference to the mean of the two without within a round; the difference of these two is noise. A first token of the
bundled model takes some 80 ms, whose noise is more than a seen schema may add: so the same is asked of a server whose
model has one of its thirty layers, and is the same otherwise: tokenizer, vocabulary, and with these the work for masks.

CPU time of the server's processes is told beside it: where other programs hold the cores, times say little, and it
still says what there is to do.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
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


class _Asked(NamedTuple):
    duration_ms: float
    cpu_ms: float  # of all processes of the server


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
    of_cpu = [{kind: asked.cpu_ms for kind, asked in answers.items()} for answers in rounds]
    times = [{kind: asked.duration_ms for kind, asked in answers.items()} for answers in rounds]
    noise, seen, new = _added(times)
    plain_ms = percentile([one["plain"] for one in times], 50)
    cpu_noise, cpu_seen, cpu_new = _added(of_cpu)
    return [
        Figure(f"{model}: without a schema, p50", plain_ms, "ms"),
        share_figure(f"{model}: noise, added by nothing", noise, 50, "ms"),
        share_figure(f"{model}: noise, added by nothing", noise, 99, "ms"),
        share_figure(f"{model}: added by a seen schema", seen, 50, "ms", _MOST_SEEN_MS, noise),
        share_figure(f"{model}: added by a new schema", new, 50, "ms", _MOST_NEW_MS, noise),
        share_figure(f"{model}: added by a new schema", new, 99, "ms", _MOST_NEW_P99_MS, noise),
        share_figure(f"{model}: CPU time added by nothing", cpu_noise, 50, "ms"),
        share_figure(f"{model}: CPU time added by a seen schema", cpu_seen, 50, "ms"),
        share_figure(f"{model}: CPU time added by a new schema", cpu_new, 50, "ms"),
    ]


def _added(rounds: list[dict[str, float]]) -> tuple[list[float], list[float], list[float]]:
    """In each round: by nothing, by a seen schema, by a new one."""
    noise = [of_kind["again"] - of_kind["plain"] for of_kind in rounds]
    seen, new = (
        [of_kind[kind] - (of_kind["plain"] + of_kind["again"]) / 2 for of_kind in rounds] for kind in ("seen", "new")
    )
    return noise, seen, new


def _rounds(url: str, num_rounds: int) -> list[dict[str, _Asked]]:
    """By kind."""
    schemas: list[dict[str, Any]] = json.loads(_SCHEMAS.read_text())
    rng = random.Random(7)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    pids = [process.pid for process in psutil.Process().children(recursive=True) if _is_ours(process)]
    rounds = []
    for number in range(_WARM_UP_ROUNDS + num_rounds):
        new = {**schemas[number % len(schemas)], "title": f"{number} of this run"}  # nobody has compiled it
        given = {"plain": None, "again": None, "seen": schemas[number % _NUM_SEEN], "new": new}
        answers = {kind: _ask(connection, pids, given[kind]) for kind in rng.sample(_KINDS, len(_KINDS))}
        if number >= _WARM_UP_ROUNDS:
            rounds.append(answers)
    connection.close()
    return rounds


def _is_ours(process: psutil.Process) -> bool:
    """A replica, the proxy, or what compiles; not what Ray does by itself."""
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return command.startswith("ray::") or "compile_process" in command
    return False


def _cpu_ms(pids: list[int]) -> float:
    """CPU time of these processes. One that has ended counts for nothing."""
    total_ns = 0
    for pid in pids:
        with suppress(OSError):
            total_ns += time.clock_gettime_ns((~pid << 3) | 2)  # as clock_getcpuclockid(3) has it
    return total_ns / 1e6


def _ask(connection: http.client.HTTPConnection, pids: list[int], schema: dict[str, Any] | None) -> _Asked:
    """pids: of the server."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 1, "temperature": 0}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    text = json.dumps(body)
    cpu_before_ms, started_s = _cpu_ms(pids), time.perf_counter()
    connection.request("POST", _PATH, text, _HEADERS)
    response = connection.getresponse()
    answer = response.read()
    asked = _Asked(1e3 * (time.perf_counter() - started_s), _cpu_ms(pids) - cpu_before_ms)
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer[:300].decode(errors='replace')}")
    return asked
