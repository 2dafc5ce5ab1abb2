"""SIGTERM to a decode replica of a real server while long streams run: all of them go on at the other one, and each
token is transformers' own."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.generation_spec import GenerationSpec
from scheduler.sampling_params import SamplingParams
from tests.engines.grammar_reference import GrammarReference
from tests.engines.tiny_model import save_tiny_model
from tests.engines.tiny_tokenizer import END_ID, VOCAB_SIZE, save_tiny_tokenizer
from tests.server.generate import stream
from tests.server.processes import replicas, wait_until
from tests.server.running_server import run_server

NUM_STREAMS = 32
NUM_TOKENS = 490
PATIENCE_S = 600.0
CHANGES = {
    "ingress.replicas": 1,
    "model.max_model_len": 512,
    "pools.prefill.replicas": 1,
    "pools.decode.lag": 1,
    "pools.decode.kv_capacity_tokens": 32768,
    "pools.decode.max_running_sequences": 64,
    "pools.decode.max_batch_tokens": 256,
    "routing.local_by_cost": False,
    "lifecycle.frozen_after_s": 120.0,
    "lifecycle.restart_after_s": 240.0,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_sigterm_moves_all_streams_and_no_token_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    specs = [_spec(number) for number in range(NUM_STREAMS)]
    with (
        run_server("local-2p2d.yaml", tmp_path, {**CHANGES, "model.source": str(folder)}) as server,
        server.client(PATIENCE_S) as client,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        # Until the signal has been heard no stream goes beyond its first token: none ends before, however fast this
        # machine is, and however late that process gets to hear it.
        server.hold("decode.step")
        asked = [pool.submit(stream, client, "/v1/completions", _body(spec)) for spec in specs]
        wait_until(lambda: server.total("splitserve_time_to_first_token_seconds_count") >= NUM_STREAMS, PATIENCE_S)
        pid, told_s = replicas(server, "decode")[0], time.monotonic()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: "SIGTERM: draining" in server.log(), PATIENCE_S)
        server.clear_faults()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), PATIENCE_S)
        gone_s, num_ended = time.monotonic() - told_s, sum(future.done() for future in asked)
        answers = [future.result(PATIENCE_S) for future in asked]
        num_moved = server.total("splitserve_migrations_total", outcome="moved")
        pause_s = server.total("splitserve_migration_seconds_sum") / max(1.0, num_moved)
        print(f"gone after {gone_s:.1f} s, {num_ended} had ended; {num_moved:.0f} moved, {pause_s:.3f} s each")
        assert num_moved >= 2
        assert not server.total("splitserve_migrations_total", outcome="lost")
        assert not server.total("splitserve_retries_total")
        wait_until(lambda: len(replicas(server, "decode")) == 2, PATIENCE_S)
        server.wait_for_baseline()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = GrammarReference(model, folder, VOCAB_SIZE, {END_ID})
    for spec, answer in zip(specs, answers, strict=True):
        assert len(answer) == len(spec.choices)
        for choice, got in enumerate(answer):
            assert len(got.token_ids) == NUM_TOKENS
            is_text = reference.is_text(spec, got.token_ids, choice)
            assert is_text or reference.parts_at_near_tie(spec, got.token_ids, choice), (spec, choice)


def _spec(number: int) -> GenerationSpec:
    """Greedy and seeded, every eighth of three choices."""
    rng = random.Random(number)
    prompt = tuple(rng.randrange(3, VOCAB_SIZE - 12) for _ in range(rng.randint(1, 20)))
    sampling = SamplingParams(0.0) if number % 2 else SamplingParams(0.9, 0, 0.95, seed=number)
    choices = (0, 1, 2) if number % 8 == 4 else (0,)
    return GenerationSpec(prompt, choices, NUM_TOKENS, frozenset(), sampling)


def _body(spec: GenerationSpec) -> dict[str, Any]:
    params = spec.sampling
    body = {"prompt": list(spec.prompt_ids), "max_tokens": NUM_TOKENS, "n": len(spec.choices), "ignore_eos": True}
    how = {"top_p": params.top_p, "seed": params.seed} if params.temperature else {}
    return {**body, **how, "temperature": params.temperature, "return_token_ids": True}
