"""The weights in the folder of a running server are replaced by another model's of the same size, and its replicas die
one by one: every answer is one of the two models', whole. A stream whose model has died out ends with an error.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.model_folder import model_folder
from tests.server.generate import stream
from tests.server.processes import kill, redeploy, replicas, wait_until
from tests.server.running_server import RunningServer, run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

NUM_CLIENTS = 10
MAX_TOKENS = 120
PROMPTS = [[100 + i, 7, 3 * i + 5, 900 - i] * (1 + i % 5) for i in range(10)]
Texts = list[list[int]]


def save_model(folder: Path, seed: int) -> None:
    """Random weights behind the bundled model's tokenizer; texts of two seeds part with the first token."""
    shutil.copytree(model_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def texts_of(folder: Path) -> Texts:
    """transformers' own greedy tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


@dataclass
class Outcomes:
    """How streams ended: "a", "b" (that model's text), "neither", or "error"."""

    of_model: dict[str, Texts]
    ends: list[str] = field(default_factory=list)
    strange: list[Any] = field(default_factory=list)

    def take(self, index: int, token_ids: list[int]) -> None:
        whose = [name for name, texts in self.of_model.items() if texts[index] == token_ids]
        self.ends.append(whose[0] if whose else "neither")
        if not whose:
            self.strange.append((index, token_ids))


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    """Models in the folders a and b, their files of the same size, no two texts alike; a's in "served" too."""
    for name, seed in (("a", 1), ("b", 2)):
        save_model(tmp_path / name, seed)
    sizes = {(tmp_path / name / "model.safetensors").stat().st_size for name in "ab"}
    assert len(sizes) == 1
    of_model = {name: texts_of(tmp_path / name) for name in "ab"}
    assert not any(a == b for a, b in zip(*of_model.values(), strict=True))
    shutil.copytree(tmp_path / "a", tmp_path / "served")
    return Outcomes(of_model)


def test_weights_swapped_in_the_folder_and_replicas_killed(outcomes: Outcomes, tmp_path: Path) -> None:
    changes = changes_for(tmp_path) | {"ingress.replicas": 1}
    with run_server("local-2p2d.yaml", tmp_path, changes) as server, streams(server, outcomes):
        wait_until_more(outcomes, 2 * NUM_CLIENTS)
        assert set(outcomes.ends) == {"a"}
        shutil.copyfile(tmp_path / "b" / "model.safetensors", tmp_path / "served" / "model.safetensors")  # as `cp` does
        wait_until_more(outcomes, NUM_CLIENTS)
        assert set(outcomes.ends) == {"a"}, "what runs is not what lies in the folder"
        seen_unlike = []
        for pool in ("decode", "prefill", "decode", "prefill"):
            kill_oldest(server, pool)
            wait_until_more(outcomes, NUM_CLIENTS)
            seen_unlike.append(server.total("splitserve_unlike_replicas"))
            print(pool, Counter(outcomes.ends), "unlike:", seen_unlike[-1])
        only_b_from_now_on(server, outcomes)
    print(f"{len(outcomes.ends)} streams: {Counter(outcomes.ends)}")
    assert outcomes.strange == []
    assert {"a", "b"} <= set(outcomes.ends)
    assert len(outcomes.ends) >= 100
    assert max(seen_unlike) > 0
    assert "can exchange KV with no" in server.log()


def test_a_rolling_update_from_one_model_to_the_other(outcomes: Outcomes, tmp_path: Path) -> None:
    """Of two fine-tunes of one base, say. No request fails, none waits for long, each has one model's text."""
    with run_server("local-2p2d.yaml", tmp_path, changes_for(tmp_path)) as server, streams(server, outcomes):
        wait_until_more(outcomes, 2 * NUM_CLIENTS)
        assert set(outcomes.ends) == {"a"}
        before = {pool: set(replicas(server, pool)) for pool in ("prefill", "decode", "ingress")}
        config = tmp_path / "config.yaml"
        config.write_text(config.read_text().replace(str(tmp_path / "served"), str(tmp_path / "b")))
        redeploy(server, "--roll", "prefill", "--roll", "decode", "--roll", "ingress")
        for pool, pids in before.items():
            wait_until(lambda pool=pool, pids=pids: _all_are_new(replicas(server, pool), pids), 300.0)
        only_b_from_now_on(server, outcomes)
    print(f"{len(outcomes.ends)} streams: {Counter(outcomes.ends)}")
    assert outcomes.strange == []
    assert set(outcomes.ends) == {"a", "b"}


def _all_are_new(now: list[int], before: set[int]) -> bool:
    return len(now) == 2 and before.isdisjoint(now)


def changes_for(folder: Path) -> dict[str, Any]:
    return {
        "model.source": str(folder / "served"),
        "model.max_model_len": 512,
        "model.name": "m",
        "lifecycle.recovery_timeout_s": 60.0,
        "routing.fallback_to_decode": False,
    }


def only_b_from_now_on(server: RunningServer, outcomes: Outcomes) -> None:
    before = len(outcomes.ends)
    wait_until_more(outcomes, 3 * NUM_CLIENTS)
    assert set(outcomes.ends[before + NUM_CLIENTS :]) == {"b"}, "all are of the new model now"
    assert server.total("splitserve_unlike_replicas") == 0


@contextmanager
def streams(server: RunningServer, outcomes: Outcomes) -> Iterator[None]:
    """Clients with a stream open all the time."""
    stopping = threading.Event()

    def run(client_index: int) -> None:
        turn = client_index
        while not stopping.is_set():
            index = turn % len(PROMPTS)
            turn += 1
            body = {
                "prompt": PROMPTS[index], "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            try:
                with server.client(180.0) as client:
                    (answer,) = stream(client, "/v1/completions", body)
                outcomes.take(index, answer.token_ids)
            except (httpx.HTTPError, AssertionError, KeyError, json.JSONDecodeError):
                outcomes.ends.append("error")  # an error event, or a status that is none of 200
                stopping.wait(0.2)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(200.0)


def kill_oldest(server: RunningServer, pool: str) -> None:
    """SIGKILL of the replica that has lived longest; returns when another has taken its place."""
    before = replicas(server, pool)
    victim = min(before, key=started)
    kill(victim)
    wait_until(lambda: len(set(replicas(server, pool)) - {victim}) == 2, 120.0)
    wait_until(lambda: server.total("splitserve_build_info", pool=pool) == 2, 120.0)


def started(pid: int) -> int:
    """When, in clock ticks since the machine's start: field 22 of proc(5)'s stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def wait_until_more(outcomes: Outcomes, number: int) -> None:
    goal = len(outcomes.ends) + number
    wait_until(lambda: len(outcomes.ends) >= goal, 180.0)
    time.sleep(0.5)
