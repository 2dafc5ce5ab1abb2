"""What masks cost, as a campaign measures it: over HTTP on a server, in a bare engine, and told in the table."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.gpu.campaign import KEPT, SERVED, WORKLOADS
from benchmarks.gpu.campaign_record import CampaignRecord
from benchmarks.gpu.campaign_table import as_text
from benchmarks.gpu.card_pieces import masks
from benchmarks.gpu.mask_load import SCHEMA, Burst, body_of, measure_over_http, missing
from tests.engines.tiny_model import save_tiny_model
from tests.engines.tiny_tokenizer import save_tiny_tokenizer

BURST = Burst(3, 8, 5, 1)


class Answering(BaseHTTPRequestHandler):
    """A server of streamed completions. It notes what it was asked; its texts are by a schema only if it reads one."""

    reads_schemas = True
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        text = "[" if self.reads_schemas and "structured_outputs" in body else "words"
        choice = {"index": 0, "text": text, "finish_reason": None}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if body.get("stream"):
            events = [json.dumps({"choices": [choice]})] * body["max_tokens"]
            events += [json.dumps({"choices": [choice | {"text": "", "finish_reason": "length"}], "usage": usage})]
            said, kind = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode(), "text/event-stream"
        else:
            said, kind = json.dumps({"choices": [choice], "usage": usage}).encode(), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args: object) -> None: ...


def measured(reads_schemas: bool, record: CampaignRecord) -> list[dict[str, Any]]:
    """Bodies of the requests that a server got."""
    handler = type("Handler", (Answering,), {"reads_schemas": reads_schemas, "bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            assert measure_over_http(url, "shape", "vllm-masks", BURST, record, lambda seconds: True)
        finally:
            server.shutdown()
            thread.join()
    bodies: list[dict[str, Any]] = handler.bodies  # type: ignore[attr-defined]
    return bodies


def test_a_server_is_asked_for_both_kinds_and_both_ways_once() -> None:
    record = CampaignRecord([], [])
    bodies = measured(True, record)
    assert missing("vllm-masks", BURST, record) == []
    held = [body for body in bodies if body.get("structured_outputs") == {"json": SCHEMA}]
    # Four runs of each kind: two ways, twice; each with a warm-up. And the check at the beginning.
    assert len(held) == 4 * (BURST.num_streams + 1) + 1
    assert len(bodies) == 8 * (BURST.num_streams + 1) + 1
    assert all(body["ignore_eos"] for body in bodies)
    line = record.of("vllm-masks", BURST.name("sampled", "held"))
    assert line is not None
    assert line["failed"] == 0
    assert line["short_outputs"] == 0
    assert len(measured(True, record)) == 1, "what is recorded is not measured again"


def test_a_server_that_leaves_the_schema_unread_is_not_measured() -> None:
    record = CampaignRecord([], [])
    assert len(measured(False, record)) == 1
    assert "no text by the schema" in record.lines[-1]["error"]


def test_the_table_has_what_masks_cost() -> None:
    record = CampaignRecord([], [])
    record.lines = [
        {"piece": "masks", "workload": None, "64_greedy_plain_ms": 7.0, "64_greedy_held_ms": 7.07, "start_s": 20.0},
        {"piece": "vllm-masks", "workload": "64x256 greedy plain", "median_tpot_ms": 8.0},
        {"piece": "vllm-masks", "workload": "64x256 greedy held", "median_tpot_ms": 10.0},
        {"piece": "lanes-masks", "workload": "64x256 greedy plain", "median_tpot_ms": 8.0},
    ]
    text = as_text(record, {load.name: load for load in WORKLOADS}, json.loads(KEPT.read_text()))
    (alone,) = [line for line in text.splitlines() if "masks, 64 greedy rows" in line]
    assert "+1.0" in alone
    assert "reached" in alone
    (theirs,) = [line for line in text.splitlines() if "vllm-masks, 64x256 greedy" in line]
    assert "+25.0" in theirs
    assert "lanes-masks" not in text, "its other half is not there"


def test_vllm_s_server_measures_masks_too_so_no_other_need_start() -> None:
    names = {piece.name: piece.masks_as for piece in SERVED}
    assert names["vllm"] == names["vllm-masks"] == "vllm-masks"
    assert names["colocated"] == names["colocated-masks"] == "colocated-masks"
    assert body_of("greedy", "plain") == {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.slow
def test_steps_of_a_bare_engine_with_and_without_masks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    save_tiny_tokenizer(tokenizer)
    (tokenizer / "generation_config.json").unlink()
    asked = argparse.Namespace(
        shape=tmp_path / "config.json", tokenizer=tokenizer, device="cpu", dtype="float32", small=True
    )
    found = masks(asked)
    for way in ("greedy", "sampled"):
        assert found[f"4_{way}_plain_ms"] > 0
        assert found[f"4_{way}_held_ms"] > 0
    assert found["masks_4_threads_2_ms"] > 0
