"""1,000 requests in random order over 2P2D while replicas are killed: each text is transformers', whatever is cached.

Prompts begin as others do or go on from their answers; greedy and sampled ones, several choices, beam searches; memory
is for a few requests at a time, so that what is cached is evicted, goes to host memory and comes back, and running
requests give way. A tenth of the clients leave early.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.beam_search import BeamParams
from scheduler.generation_spec import GenerationSpec
from scheduler.sampling_params import SamplingParams
from tests.engines.grammar_reference import GrammarReference
from tests.engines.tiny_model import save_tiny_model
from tests.engines.tiny_tokenizer import END_ID, VOCAB_SIZE, save_tiny_tokenizer
from tests.golden.beam_case import BeamCase
from tests.golden.beam_reference import reference_texts
from tests.server.generate import post, stream
from tests.server.processes import cpu_ticks, is_ready, kill, replicas, wait_until
from tests.server.running_server import RunningServer, run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]

NUM_REQUESTS = 1_000
NUM_KILLS = 10  # one by one, of decode and prefill replicas in turn
NUM_CLIENTS = 16
LONGEST_PROMPT = 200
NUM_SENDABLE = VOCAB_SIZE - 12  # tokens that have a text; others may be answered, not asked
PATIENCE_S = 180.0
ENDS = frozenset({END_ID})
# Memory for two to five of the requests in each replica, and for twice as much in prefill's host memory.
CHANGES = {
    "model.dtype": "float32",
    "model.max_model_len": 320,
    "routing.local_prefill_max_tokens": 24,
    "routing.local_by_cost": False,  # so that blocks are read, however fast the model is
    "pools.prefill.kv_capacity_tokens": 512,
    "pools.prefill.max_batch_tokens": 96,
    "pools.prefill.host_memory_bytes": 64 * 8192,
    "pools.prefill.lag": 1,
    "pools.decode.kv_capacity_tokens": 512,
    "pools.decode.lag": 1,
    "pools.decode.admission.output_length": "quantile",
    "pools.decode.admission.quantile": 0.1,
    "pools.decode.host_memory_bytes": 12 * 8192,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """leaves_after: events of the stream after which its client leaves. texts: transformers' own, of each choice.
    spec: None for a beam search."""

    body: dict[str, Any]
    spec: GenerationSpec | None
    is_streamed: bool
    leaves_after: int | None
    texts: tuple[tuple[int, ...], ...]


class Texts:
    """Requests whose prompts begin as others, with the texts that they are to have."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._reference = GrammarReference(self._model, folder, VOCAB_SIZE, ENDS)
        self._known = [self._random_ids(length) for length in (40, 70, 96, 130, 161)]

    def _random_ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, NUM_SENDABLE) for _ in range(count)]

    def _prompt(self) -> list[int]:
        before = self._rng.choice(self._known)
        before = before[: self._rng.choice([len(before), self._rng.randint(1, len(before))])]
        return [*before, *self._random_ids(self._rng.choice([1, 3, 20]))][-LONGEST_PROMPT:]

    def asked(self, number: int) -> Asked:
        rng, prompt = self._rng, self._prompt()
        # Mostly short: who is admitted as one of those and is long has to give way to others.
        max_tokens = rng.choice([2, 3, 4, 6, 12, 60, 60])
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        kind, spec = rng.random(), None
        if kind < 0.1:
            width, max_tokens = rng.choice([2, 3]), min(max_tokens, 12)
            num_returned = rng.randint(1, width)
            case = BeamCase(tuple(prompt), BeamParams(width), num_returned, max_tokens, ENDS)
            body |= {"use_beam_search": True, "best_of": width, "n": num_returned, "max_tokens": max_tokens}
            texts = [ids for _, ids in sorted(reference_texts(self._model, case).items())]
        else:
            params = SamplingParams(0.0) if kind < 0.5 else SamplingParams(0.9, 0, 0.95, seed=number)
            num_choices = 1 if kind < 0.75 else rng.choice([2, 3])
            body |= {"temperature": params.temperature, "n": num_choices}
            if params.temperature:
                body |= {"top_p": params.top_p, "seed": params.seed}
            spec = GenerationSpec(tuple(prompt), tuple(range(num_choices)), max_tokens, ENDS, params)
            texts = [self._reference.text(spec, choice) for choice in spec.choices]
        self._known.append(list(takewhile(lambda token: token < NUM_SENDABLE, [*prompt, *rng.choice(texts)])))
        leaves_after = rng.choice([1, 2, 5]) if rng.random() < 0.1 else None
        return Asked(body, spec, rng.random() < 0.5, leaves_after, tuple(map(tuple, texts)))

    def is_near_tie(self, asked: Asked, unlike: Mapping[int, list[int]]) -> bool:
        """Whether all these choices part at a near tie from what they should be."""
        spec = asked.spec
        return spec is not None and all(self._reference.parts_at_near_tie(spec, ids, i) for i, ids in unlike.items())


@dataclass(slots=True)
class Clients:
    """unlike: choices that have another text; failed: answers that did not come."""

    server: RunningServer
    ended: list[str] = field(default_factory=list)  # "whole" or "left"
    unlike: list[tuple[Asked, dict[int, list[int]]]] = field(default_factory=list)
    failed: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def ask(self, asked: Asked) -> None:
        """One client's request, from a thread of its own. Raises nothing."""
        try:
            with self.server.client(PATIENCE_S) as client:
                if asked.leaves_after is None:
                    self._whole(client, asked)
                else:
                    self._leave(client, asked, asked.leaves_after)
        except (httpx.HTTPError, AssertionError) as error:
            self.failed.append((asked.body, f"{type(error).__name__}: {error}"[:500]))

    def _whole(self, client: httpx.Client, asked: Asked) -> None:
        answer = (stream if asked.is_streamed else post)(client, "/v1/completions", asked.body)
        got = [choice.token_ids for choice in answer]
        assert len(got) == len(asked.texts)
        self._compare(asked, {index: ids for index, ids in enumerate(got) if tuple(ids) != asked.texts[index]})
        ends = ["stop" if choice.token_ids[-1:] == [END_ID] else "length" for choice in answer]
        assert [choice.finish_reason for choice in answer] == ends
        self.ended.append("whole")

    def _leave(self, client: httpx.Client, asked: Asked, leaves_after: int) -> None:
        """What has come until then is the beginning of the text."""
        got: dict[int, list[int]] = {}
        with client.stream("POST", "/v1/completions", json={**asked.body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for number, line in enumerate(filter(None, response.iter_lines()), start=1):
                event = {"choices": []} if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
                assert "choices" in event, event
                for choice in event["choices"]:
                    got.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                if number == leaves_after:
                    break
        self._compare(asked, {i: ids for i, ids in got.items() if tuple(ids) != asked.texts[i][: len(ids)]})
        self.ended.append("left")

    def _compare(self, asked: Asked, unlike: dict[int, list[int]]) -> None:
        if unlike:
            self.unlike.append((asked, unlike))


class Counted:
    """Counters of all replicas that there ever were, also of those that have died."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._largest: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def look(self) -> None:
        for name, labels, value in self._server.metrics():
            if name.endswith("_total"):
                key = (name, frozenset(labels.items()))
                self._largest[key] = max(value, self._largest.get(key, 0.0))

    def __call__(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(v for (n, got), v in self._largest.items() if n == f"splitserve_{name}_total" and wanted <= got)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    return folder


@contextmanager
def serving(folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    with run_server("local-2p2d.yaml", tmp_path, {**CHANGES, "model.source": str(folder)}) as server:
        yield server


def kill_the_busiest(server: RunningServer, pool: str) -> None:
    """Returns when another replica of the pool answers in its place."""
    before = replicas(server, pool)
    assert len(before) == 2
    ticks = {pid: cpu_ticks(pid) for pid in before}
    time.sleep(0.3)
    victim = max(before, key=lambda pid: cpu_ticks(pid) - ticks[pid])
    killed_s = time.monotonic()
    kill(victim)

    def is_whole() -> bool:
        pids = replicas(server, pool)
        return victim not in pids and len(pids) == 2 and is_ready(server) and num_answering(server, pool) == 2

    wait_until(is_whole, PATIENCE_S)
    print(f"{pool} {victim} killed, replaced after {time.monotonic() - killed_s:.0f} s", flush=True)


def num_answering(server: RunningServer, pool: str) -> int:
    samples = server.metrics()
    return len(
        {about["replica"] for name, about, _ in samples if name.endswith("_kv_blocks") and about["pool"] == pool}
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_every_text_is_transformers(folder: Path, tmp_path: Path, seed: int) -> None:
    began_s = time.monotonic()
    texts = Texts(folder, seed)
    all_asked = [texts.asked(number) for number in range(NUM_REQUESTS)]
    random.Random(seed).shuffle(all_asked)
    print(f"texts by transformers after {time.monotonic() - began_s:.0f} s", flush=True)
    with serving(folder, tmp_path) as server, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        began_s = time.monotonic()
        clients, counted = Clients(server), Counted(server)
        size = NUM_REQUESTS // NUM_KILLS
        for part in range(NUM_KILLS):
            futures = [pool.submit(clients.ask, asked) for asked in all_asked[part * size : (part + 1) * size]]
            _watch(futures, counted, until=size // 3)
            kill_the_busiest(server, ("decode", "prefill")[part % 2])
            _watch(futures, counted, until=size)
        elapsed_s = time.monotonic() - began_s
        server.wait_for_baseline()
        counted.look()
        num = Counter(clients.ended)
        print(f"{num['whole']} requests compared, {num['left']} clients left, {elapsed_s:.0f} s")
        print(*(f"{name} {labels}: {counted(name, **labels):.0f}" for name, labels in REPORTED), sep="\n")
        print(Counter("beams" if "use_beam_search" in a.body else f"n {a.body['n']}" for a in all_asked))
        wrong = [(asked.body, asked.texts, got) for asked, got in clients.unlike if not texts.is_near_tie(asked, got)]
        print(f"{len(clients.unlike) - len(wrong)} parted at a near tie, {len(wrong)} wrong")
        assert wrong == []
        assert len(clients.unlike) <= NUM_REQUESTS // 200
        assert clients.failed == []
        assert num.total() == NUM_REQUESTS
        assert num["left"] > NUM_REQUESTS // 20
        assert counted("replica_losses", of_pool="decode", reason="dead") >= NUM_KILLS // 2
        for name, labels in REPORTED:
            assert counted(name, **labels) > 0, (name, labels)


REPORTED: list[tuple[str, dict[str, str]]] = [
    ("retries", {}),
    ("preemptions", {"kind": "swap"}),
    ("preemptions", {"kind": "recompute"}),
    ("prefix_evicted_blocks", {"pool": "prefill"}),
    ("prefix_evicted_blocks", {"pool": "decode"}),
    ("prefix_tokens", {"pool": "prefill", "result": "device"}),
    ("prefix_tokens", {"pool": "prefill", "result": "host"}),
    ("prefix_tokens", {"pool": "decode", "result": "device"}),
    ("kv_transfers", {"result": "ready"}),
    ("replica_losses", {"reason": "dead"}),
]


def _watch(futures: list[Future[None]], counted: Counted, until: int) -> None:
    """Returns when so many are done."""
    deadline_s = time.monotonic() + 2 * PATIENCE_S
    while sum(future.done() for future in futures) < until:
        assert time.monotonic() < deadline_s, "requests hang"
        counted.look()
        time.sleep(0.5)
