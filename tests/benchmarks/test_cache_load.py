"""What a prefix cache brings, as a campaign measures it: over HTTP on a server, in a bare engine, told in the table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest

from benchmarks.gpu.cache_load import CacheLoad, measure_over_http, missing
from benchmarks.gpu.campaign import ALONE, KEPT, SERVED, WORKLOADS
from benchmarks.gpu.campaign_record import CampaignRecord
from benchmarks.gpu.campaign_table import as_text
from benchmarks.gpu.card_pieces import PIECES, cache_steps
from benchmarks.gpu.vllm_servers import own_vllm_cache, vllm_cache_flags
from tests.engines.tiny_model import save_tiny_model

LOAD = CacheLoad(40, 3, 3, 4, 20, 10, 5, 2)


class Remembering(BaseHTTPRequestHandler):
    """A server of streamed completions with a prefix cache of whole prompts and answers; as vLLM it leaves the number
    of cached tokens out when that is 0."""

    has_cache = True
    returns_ids = True
    lock: Lock
    seen: list[list[int]]
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        with self.lock:
            found = max((len(ids) for ids in self.seen if self.has_cache and ids == prompt[: len(ids)]), default=0)
            answer = [7000 + len(self.bodies)] * body["max_tokens"]
            self.bodies.append(body)
            self.seen.append(prompt + answer)
            self.seen.append(prompt[:-1])
        shown = {"token_ids": answer[:1]} if self.returns_ids and body.get("return_token_ids") else {}
        choice = {"index": 0, "text": "a", "finish_reason": None, **shown}
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if found:
            usage["prompt_tokens_details"] = {"cached_tokens": found}
        events = [json.dumps({"choices": [choice]})] * body["max_tokens"]
        events.append(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}))
        said = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        with suppress(ConnectionError):  # the client may have given up meanwhile
            self.wfile.write(said)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def serving(**kind: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL, and the bodies that it gets."""
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (Remembering,), {"lock": Lock(), "seen": [], "bodies": bodies, **kind})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        finally:
            server.shutdown()
            thread.join()


def measured(record: CampaignRecord, has_time: bool = True, **kind: bool) -> tuple[bool, list[dict[str, Any]]]:
    with serving(**kind) as (url, bodies):
        is_done = measure_over_http(url, "shape", "vllm-cache", LOAD, record, lambda seconds: has_time)
    return is_done, bodies


def test_each_turn_begins_with_all_of_the_last_one() -> None:
    record = CampaignRecord([], [])
    is_done, bodies = measured(record)
    assert is_done
    assert missing("vllm-cache", LOAD, record) == []
    num_repeated = 2 + 1 + LOAD.num_warm
    assert len(bodies) == num_repeated + LOAD.num_repeats * LOAD.num_chats * LOAD.num_turns
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in bodies)
    lengths = [20, 35, 50, 65]  # the prompt before, its answer of 5, and 10 more
    chats = bodies[num_repeated:]
    assert sorted(len(body["prompt"]) for body in chats) == sorted(lengths * 6)
    assert len({tuple(body["prompt"][:20]) for body in chats}) == LOAD.num_repeats * LOAD.num_chats
    line = record.of("vllm-cache", LOAD.name("chats"))
    assert line is not None
    # Of a later prompt all but its 10 new tokens was found: the answer counts too.
    assert line["later_cached_share"] == round(sum(lengths[:3]) / sum(lengths[1:]) + 3 * 5 / sum(lengths[1:]), 4)
    assert line["cached_share"] < line["later_cached_share"]
    assert line["turns"] == 24
    assert len(line["walls_s"]) == LOAD.num_repeats


def test_the_repeated_prompt_is_new_once_and_found_then() -> None:
    record = CampaignRecord([], [])
    _, bodies = measured(record)
    line = record.of("vllm-cache", LOAD.name("repeated"))
    assert line is not None
    assert line["cached_tokens"] == [None, 39, 39, 39]
    assert len(line["warm_ttfts_ms"]) == LOAD.num_warm
    assert line["cold_ttft_ms"] > 0
    prompts = [tuple(body["prompt"]) for body in bodies[:6]]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(set(prompts[2:])) == 1


def test_what_is_recorded_is_not_measured_again_and_nothing_is_begun_without_time() -> None:
    record = CampaignRecord([], [])
    is_done, bodies = measured(record, has_time=False)
    assert not is_done
    assert bodies == []
    measured(record)
    is_done, bodies = measured(record, has_time=False)
    assert is_done
    assert bodies == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [({"has_cache": False}, "no answer says that anything"), ({"returns_ids": False}, "0 ids of an answer's 5")],
)
def test_a_server_without_a_cache_or_without_ids_is_not_measured(kind: dict[str, bool], said: str) -> None:
    record = CampaignRecord([], [])
    measured(record, **kind)
    assert said in record.lines[-1]["error"]
    assert "chats" in missing("vllm-cache", LOAD, record)


def test_vllm_has_its_cache_for_this_piece_only() -> None:
    pieces = {piece.name: piece for piece in SERVED}
    assert pieces["vllm-cache"].cache_as == "vllm-cache"
    assert pieces["vllm"].cache_as is None
    assert pieces["colocated"].cache_as == pieces["colocated-cache"].cache_as == "colocated-cache"
    assert vllm_cache_flags(False) == ["--no-enable-prefix-caching"]
    assert "--enable-prompt-tokens-details" in vllm_cache_flags(True)
    assert "cache-steps" in ALONE.keys() & PIECES.keys()


def test_two_vllms_on_two_cards_compile_into_folders_of_their_own() -> None:
    first, second = (own_vllm_cache({"CUDA_VISIBLE_DEVICES": card})["VLLM_CACHE_ROOT"] for card in "01")
    assert first != second
    assert own_vllm_cache({}) == {}
    asked = {"CUDA_VISIBLE_DEVICES": "1", "VLLM_CACHE_ROOT": "/there"}
    assert own_vllm_cache(asked) == asked


def test_the_table_has_targets_and_what_vllm_takes() -> None:
    record = CampaignRecord([], [])
    load = CacheLoad()
    chats = {"first_p50_ttft_ms": 500.0, "later_p50_ttft_ms": 60.0, "later_p90_ttft_ms": 90.0, "p90_tpot_ms": 8.0}
    chats |= {"wall_s": 5.0, "cached_share": 0.8, "later_cached_share": 0.9}
    repeated = {"cold_ttft_ms": 200.0, "warm_ttft_ms": 30.0}
    record.lines = [
        {"piece": "cache-steps", "workload": None, "cold_ms": 195.0, "warm_ms": 15.0, "step_64_on_ms": 7.1}
        | {"step_64_off_ms": 7.0, "step_64_more_percent": 1.4, "step_64_apart_percent": 0.2, "prefill_1000_on_ms": 20.0}
        | {"prefill_1000_off_ms": 20.0, "prefill_1000_more_percent": 0.1, "prefill_1000_apart_percent": 0.2},
        {"piece": "colocated-cache", "workload": load.name("repeated"), **repeated},
        {"piece": "vllm-cache", "workload": load.name("repeated"), **repeated, "warm_ttft_ms": 25.0},
        {"piece": "vllm-cache", "workload": load.name("chats"), **chats},
        {"piece": "colocated-cache", "workload": load.name("chats"), **chats, "later_cached_share": 0.81},
    ]
    lines = as_text(record, {load.name: load for load in WORKLOADS}, json.loads(KEPT.read_text())).splitlines()

    def row(*parts: str) -> str:
        (line,) = [line for line in lines if all(part in line for part in parts)]
        return line

    assert "reached" in row("cache-steps", "again, ms", "20.0")
    assert "1.0140" in row("step_64, ms; twice off 0.2 % apart")
    assert "missed by 0.9 %" in row("step_64, ms")
    assert "reached" in row("prefill_1000, ms")
    assert "missed by 20.0 %" in row("colocated-cache", "warm_ttft_ms", "1.200")
    assert "reached" in row("colocated-cache", " wall_s")
    assert "missed by 11.1 %" in row("colocated-cache", "later_cached_share")
    assert "reached" not in row("vllm-cache", "warm_ttft_ms")


@pytest.mark.slow
def test_a_bare_engine_with_a_cache_and_two_beside_it_without(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    asked = argparse.Namespace(
        shape=tmp_path / "config.json", tokenizer=None, device="cpu", dtype="float32", small=True
    )
    found = cache_steps(asked)
    assert len(found["warm_all_ms"]) == 5
    assert found["evicted_blocks"] > 0, "new blocks take the place of cached ones, as in a server that has run a while"
    for name in ("step_4", "request_of_4", "step_1", "request_of_1", "prefill_1000"):
        assert found[f"{name}_on_ms"] > 0
        assert found[f"{name}_off_ms"] > 0
        assert found[f"{name}_apart_percent"] >= 0
        assert len(found[f"{name}_more_all_percent"]) == 2
