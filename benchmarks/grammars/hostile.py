"""Hostile schemas, expressions and grammars against a real server: how long each takes, what others feel, and memory.

A stream and /health are timed while nothing else happens, while the list is sent, and while harmless ones are: as many,
as often, as many of them refused. So what is told is what hostility costs, not what requests cost. All of it several
times, in turns; from the second time on what can be made new is: nothing is known from before.

Memory grows until caches are as full as the config lets them be, and is flat from then on, unless something is never
given back. So replicas keep few compiled grammars here, that the first list fills their caches many times over; the
last list is beside the one before it, of the same size, and what the earlier ones added is told.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.grammars.verdict import Figure
from benchmarks.real_server import real_server
from benchmarks.refusals.bodies import TEXT, Kind
from benchmarks.refusals.exchange import exchange
from cluster.grammars.grammar_source import GrammarSource
from cluster.load.percentile import percentile
from tests.cluster.hostile_grammars import body_of, hostile_sources, made_new

_ROOT = Path(__file__).parents[2]
_MOST_S, _MOST_TIMES, _MOST_GROWN_MB = 1.0, 1.2, 64.0
_SEGMENT_S = 4.0  # of a bystander
_NUM_LISTS = 3
_MOST_KEPT = 64  # compiled grammars: a list has four times as many that are followed
# Of a request to the next one, unless that takes longer.
_PERIOD_S = 0.2
_PARTS = {"compile_process": "compiles", ":ingress": "ingress", ":decode": "decode", ":prefill": "prefill"}

Times = dict[str, list[float]]


def hostile_figures(every: int, quiet_s: float) -> list[Figure]:
    """every: of the list every so-manieth is sent. Starts and stops a server. Blocks for minutes. Raises RuntimeError
    where an answer is neither 200 nor 400."""
    hostile = dict(list(hostile_sources())[::every])
    felt: dict[str, Times] = {case: defaultdict(list) for case in ("quiet", "harmless", "hostile")}
    seconds: dict[str, float] = {}
    after_hostile: list[Counter[str]] = []
    after_harmless: list[Counter[str]] = []
    numbers = itertools.count()
    config = _config()
    with tempfile.TemporaryDirectory() as folder, real_server(config, Path(folder)) as url:
        exchange(url, Kind("first", TEXT, body_of(_harmless(next(numbers), 200))))
        _bystand(url, _SEGMENT_S)
        for number in range(_NUM_LISTS):
            _add(felt["quiet"], _bystand(url, quiet_s))
            with _bystanding(url, felt["hostile"]):
                news = {name: made_new(source, number) for name, source in hostile.items()}
                answers = _send(url, news)
            after_hostile.append(_memory_mb())
            seconds = {name: max(taken_s, seconds.get(name, 0.0)) for name, (_, taken_s) in answers.items()}
            with _bystanding(url, felt["harmless"]):
                _send(url, {name: _harmless(next(numbers), status) for name, (status, _) in answers.items()})
            after_harmless.append(_memory_mb())
    statuses = Counter(status for status, _ in answers.values())
    return [*_of_times(seconds, statuses), *_of_bystanders(**felt), *_of_memory(after_hostile, after_harmless)]


def _config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((_ROOT / "configs" / "local.yaml").read_text())
    return {**config, "structured_outputs": {**config["structured_outputs"], "cache_entries": _MOST_KEPT}}


def _harmless(number: int, status: int) -> GrammarSource:
    """One that is answered with this status."""
    return GrammarSource("regex", f"[a-z]+{number}" if status == 200 else f"[{number}")


def _send(url: str, sources: dict[str, GrammarSource]) -> dict[str, tuple[int, float]]:
    """One after the other. Status and seconds of each, by its name."""
    answers = {}
    for name, source in sources.items():
        next_s = time.monotonic() + _PERIOD_S
        answers[name] = status, _ = exchange(url, Kind(name, TEXT, body_of(source)))
        if status not in (200, 400):
            raise RuntimeError(f"{name}: status {status}")
        time.sleep(max(0.0, next_s - time.monotonic()))
    return answers


def _of_times(seconds: dict[str, float], statuses: Counter[int]) -> list[Figure]:
    longest = max(seconds, key=lambda name: seconds[name])
    told = f"{len(seconds)} of them: {dict(statuses)}; longest: {longest[:40]}"
    times_s = list(seconds.values())
    return [
        Figure("a hostile one, p50", percentile(times_s, 50), "s", None, told),
        Figure("a hostile one, longest", max(times_s), "s", _MOST_S, told),
    ]


def _of_bystanders(quiet: Times, harmless: Times, hostile: Times) -> list[Figure]:
    figures = []
    for name, what in (("health", "/health"), ("stream", "gap of a stream")):
        for share in (50, 90, 99):
            quiet_ms, harmless_ms, hostile_ms = (percentile(felt[name], share) for felt in (quiet, harmless, hostile))
            told = f"ms: {quiet_ms:.1f} quiet, {harmless_ms:.1f} harmless, {hostile_ms:.1f}, of {len(hostile[name])}"
            # The last hundredth of some hundreds is a few: it is told, not judged.
            most = _MOST_TIMES if share < 99 else None
            figures.append(Figure(f"{what}, p{share}", hostile_ms / harmless_ms, "times", most, told))
    return figures


def _of_memory(after_hostile: list[Counter[str]], after_harmless: list[Counter[str]]) -> list[Figure]:
    """Of each kind of process, what the last list has added since the one before it."""
    return [_memory_of(part, after_hostile, after_harmless) for part in sorted(after_hostile[-1])]


def _memory_of(part: str, after_hostile: list[Counter[str]], after_harmless: list[Counter[str]]) -> Figure:
    before, last = after_hostile[-2:]
    of_harmless = after_harmless[-2][part] - before[part]
    added = [later[part] - earlier[part] for earlier, later in pairwise(after_hostile)]
    told = (
        f"each list added {' '.join(f'{mb:+.0f}' for mb in added)}, of the last {of_harmless:+.0f} by harmless ones; "
    )
    told += f"{last[part]:.0f} MB now"
    return Figure(f"memory of {part}", added[-1], "MB more", _MOST_GROWN_MB, told)


@contextmanager
def _bystanding(url: str, times_ms: Times) -> Iterator[None]:
    """One bystander after another, while the context lasts; the last one ends it. What they felt is added."""
    over = threading.Event()
    failures: list[BaseException] = []

    def bystand() -> None:
        try:
            while not over.is_set():
                _add(times_ms, _segment(url, over))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=bystand)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


def _bystand(url: str, seconds: float) -> Times:
    """Times in ms, while nothing else is sent."""
    times: Times = defaultdict(list)
    for _ in range(max(1, round(seconds / _SEGMENT_S))):
        _add(times, _segment(url, None))
    return times


def _segment(url: str, over: threading.Event | None) -> Times:
    """One bystander's times. over: when it is set the bystander is ended, and none of them count."""
    command = [sys.executable, "-m", "benchmarks.refusals.bystander", url, str(_SEGMENT_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                if over is not None and over.is_set():
                    process.kill()
                    return {}
                continue
            if process.returncode:
                raise RuntimeError(f"a bystander ended with {process.returncode}")
            times: Times = json.loads(output)
            return times


def _add(to: Times, times_ms: Times) -> None:
    for name, values in times_ms.items():
        to[name] += values


def _memory_mb() -> Counter[str]:
    """Resident, of the server's processes: they are below this one."""
    found: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            command, resident = " ".join(process.cmdline()), process.memory_info().rss
        except psutil.Error:
            continue
        part = next((part for word, part in _PARTS.items() if word in command), None)
        if part is not None:
            found[part] += resident / 1e6
    return found
