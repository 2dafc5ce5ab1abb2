"""Steps beside a saturated prefill, as a campaign measures them: against a server whose gaps are known."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import pytest

from benchmarks.gpu.campaign_pieces import SERVED
from benchmarks.gpu.campaign_record import CampaignRecord
from benchmarks.gpu.campaign_table import as_text
from benchmarks.gpu.saturated_load import KINDS, SaturatedLoad, _steps, measure_over_http, missing
from cluster.load.request_record import RequestRecord

LOAD = SaturatedLoad(num_streams=3, num_in=10, num_out=60, num_prompts=2, num_prompt_in=30)
PIECE = "pair-split-saturated"


@dataclass
class Server:
    """Streams a token every gap_s(prompts at work). What it was asked, and the most prompts that it had at once."""

    gap_s: Callable[[int], float]
    refuses_prompts: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_prompts: int = 0
    most_prompts: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):  # cancelled at the end
            while True:
                await self._one(reader, writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        is_prompt = len(body["prompt"]) == LOAD.num_prompt_in
        if is_prompt and self.refuses_prompts:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")
            return
        self.num_prompts += is_prompt
        self.most_prompts = max(self.most_prompts, self.num_prompts)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0.02 if is_prompt else self.gap_s(self.num_prompts))
                self._event(writer, {"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            self._event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
        finally:
            self.num_prompts -= is_prompt

    @staticmethod
    def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        piece = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


def measured(server: Server, record: CampaignRecord, has_time: bool = True) -> bool:
    """In a thread of its own the server, as the client has a loop of its own."""
    url: list[str] = []
    ready, over = Event(), Event()

    async def serve() -> None:
        async with server.listening() as where:
            url.append(where)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(120)
    try:
        return measure_over_http(url[0], "shape", PIECE, LOAD, record, lambda seconds: has_time)
    finally:
        over.set()
        thread.join()


def test_gaps_beside_prompts_are_told_beside_those_alone() -> None:
    """Where this machine stands still gaps are its own: then once more."""
    tries = (times_longer() for _ in range(5))
    assert any(1.5 < prompts < 6 and 1.5 < handoffs < 6 for prompts, handoffs in tries)


def times_longer() -> tuple[float, float]:
    """How many times a step is longer, on a server that takes three times as long while it has a prompt."""
    server, record = Server(lambda num_prompts: 0.03 if num_prompts else 0.01), CampaignRecord([], [])
    assert measured(server, record)
    assert missing(PIECE, LOAD, record) == []
    assert server.most_prompts == LOAD.num_prompts
    asked = [body for body in server.bodies if len(body["prompt"]) == LOAD.num_prompt_in]
    assert {body["max_tokens"] for body in asked} == {1, 2}
    prompts_sent = [tuple(body["prompt"]) for body in asked if body["max_tokens"] == 1]
    assert len(set(prompts_sent)) == len(prompts_sent) > LOAD.num_prompts, "none is found in a cache"
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in server.bodies)
    alone, prompts, handoffs = (record.of(PIECE, LOAD.name(kind)) or {} for kind in KINDS)
    assert alone["prompts"] == 0
    assert prompts["prompts"] > 0
    assert handoffs["prompts"] > 0
    return tuple(line["mean_step_ms"] / alone["mean_step_ms"] for line in (prompts, handoffs))  # type: ignore[return-value]


def test_only_gaps_count_while_all_streams_are_at_work() -> None:
    def stream(*times_s: float) -> RequestRecord:
        return RequestRecord(0, 0.0, token_times_s=array("d", times_s))

    begin_s, end_s = 1.0, 1.4
    first = stream(0.0, 0.5, 1.0, 1.1, 1.2, 1.3, 1.4)  # long gaps before the other has begun
    second = stream(1.0, 1.1, 1.2, 1.4, 2.4)  # and after the first has ended
    line = _steps([first, second], begin_s, end_s)
    assert line["mean_step_ms"] == pytest.approx((100 + 400 / 3) / 2, abs=0.01)
    assert line["max_itl_ms"] == pytest.approx(200.0)
    assert line["p50_itl_ms"] == pytest.approx(100.0)
    assert line["seconds"] == 0.4
    with pytest.raises(RuntimeError, match="not at work at one time"):
        _steps([first, stream(1.0, 1.3)], begin_s, end_s)


def test_what_is_recorded_is_not_measured_again_and_nothing_is_begun_without_time() -> None:
    server, record = Server(lambda num_prompts: 0.001), CampaignRecord([], [])
    assert not measured(server, record, has_time=False)
    assert server.bodies == []
    assert measured(server, record)
    count = len(server.bodies)
    assert measured(server, record, has_time=False)
    assert len(server.bodies) == count


def test_a_prompt_that_fails_is_told() -> None:
    server, record = Server(lambda num_prompts: 0.001, refuses_prompts=True), CampaignRecord([], [])
    measured(server, record)
    assert "a prompt of 30 tokens: status 503: busy" in record.lines[-1]["error"]
    assert missing(PIECE, LOAD, record) == ["prompts", "handoffs"]


@pytest.mark.parametrize(("piece", "said"), [(PIECE, "missed by 47.1 %"), ("lanes-saturated", "- ")])
def test_the_table_judges_split_pools(piece: str, said: str) -> None:
    record = CampaignRecord([], [])
    for kind, step_ms in (("alone", 5.0), ("prompts", 5.05), ("handoffs", 7.5)):
        line = {"mean_step_ms": step_ms, "p99_itl_ms": 9.0, "prompt_tokens_per_s": 43_000}
        record.add({"piece": piece, "workload": LOAD.name(kind), **line})
    rows = as_text(record, {}, {"runs": []}).splitlines()
    (prompts,) = [row for row in rows if "3 rows prompts" in row]
    (handoffs,) = [row for row in rows if "3 rows handoffs" in row]
    assert "1.010" in prompts
    assert "5.05 (9)" in prompts
    assert ("reached" in prompts) is (piece == PIECE)
    assert "1.500" in handoffs
    assert said in handoffs


def test_a_campaign_has_it_for_each_layout() -> None:
    configs = {piece.name: piece.config for piece in SERVED if piece.saturated_as == piece.name}
    assert configs == {
        "pair-split-saturated": "gpu-1p1d.yaml",
        "lanes-saturated": "gpu-one-card.yaml",
        "colocated-saturated": "gpu-colocated.yaml",
    }
