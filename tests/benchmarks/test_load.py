"""The load generator against a server that streams, or fails as told: from end to end, in real processes."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.load.arrivals import Arrival
from cluster.load.client import Client, OutgoingRequest, Target
from cluster.load.command import main
from cluster.load.command_options import add_bench_options, with_bench_defaults
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan, TraceOptions
from cluster.load.processes import ClientFailed, run_load, send_all
from cluster.load.request_record import RequestRecord
from cluster.serving.command_line import main as splitserve
from tests.benchmarks.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server(first_token_s=0.05, step_s=0.01) as server:
        yield server


def test_command_line(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    arguments = f"--url {server.url} --model m --rate 40 --arrival gamma --burstiness 0.5 --num-requests 30"
    arguments += f" --input-len 8:16 --output-len 5 --processes 2 --seed 3 --output {output}"
    arguments += " --goodput ttft:5000 tpot:5000"
    assert main(arguments.split()) == 0
    summary = json.loads(output.read_text())
    assert (summary["completed"], summary["failed"], summary["short_outputs"]) == (30, 0, 0)
    assert summary["total_output_tokens"] == 150
    assert summary["total_input_tokens"] == sum(len(body["prompt"]) for body in server.bodies[1:])  # after the warm-up
    assert summary["goodput_fraction"] == 1.0
    assert summary["median_ttft_ms"] >= 50
    assert summary["median_tpot_ms"] >= 10
    assert summary["median_e2el_ms"] >= 90
    assert len(summary["client_cpu_cores"]) == summary["client_processes"] == 2
    assert "goodput (ttft <= 5000 ms" in capsys.readouterr().out
    body = server.bodies[-1]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m", 5, True, True)


def test_failures_are_counted_and_the_exit_code_says_so(server: FakeServer, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    arguments = ["--url", server.url, "--model", "m", "--rate", "inf", "--num-requests", "4", "--warmup", "0"]
    assert main([*arguments, "--body", '{"fault": "no done"}', "--output", str(output)]) == 1
    summary = json.loads(output.read_text())
    assert (summary["completed"], summary["failed"]) == (0, 4)
    assert summary["errors"] == {"the stream ended without [DONE]": 4}


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("status", "status 429"),
        ("cut before", "closed before"),
        ("cut", "closed before"),
        ("error event", "out of luck"),
        ("no done", "without [DONE]"),
    ],
)
async def test_no_failure_is_a_success(server: FakeServer, fault: str, error: str) -> None:
    record = await _send(Target(server.url, "m"), options={"fault": fault})
    assert record.error is not None
    assert error in record.error


async def test_a_server_that_is_not_there() -> None:
    record = await _send(Target("http://127.0.0.1:9", "m"))
    assert record.error is not None


async def test_a_server_that_is_too_slow(server: FakeServer) -> None:
    client = Client(Target(server.url, "m"), timeout_s=0.02)
    record = await client.send(OutgoingRequest(0, 0.0, [1], 1, 4))
    assert record.error == "no complete answer within 0.02 s"


async def test_without_a_stream(server: FakeServer) -> None:
    record = await _send(Target(server.url, "m"), stream=False)
    assert record.is_ok
    assert (record.num_output_tokens, len(record.token_times_s)) == (4, 0)


async def test_connections_are_used_again(server: FakeServer) -> None:
    client = Client(Target(server.url, "m"), timeout_s=60)
    for _ in range(3):
        assert (await client.send(OutgoingRequest(0, 0.0, [1], 1, 2))).is_ok
    client.close()
    assert server.num_connections == 1


async def test_the_loop_is_open() -> None:
    """Requests leave at their time although none has been answered."""
    with fake_server(num_together=6) as server:  # the first is not answered before the last has come
        client = Client(Target(server.url, "m"), timeout_s=60)
        requests = [OutgoingRequest(index, 0.05 * index, [1], 1, 1) for index in range(6)]
        start_s = time.monotonic() + 0.05
        records = await send_all(client, requests, start_s)
        client.close()
    assert all(record.is_ok for record in records)
    assert max(record.sent_s for record in records) < min(record.ended_s for record in records)
    assert all(record.late_s >= 0 for record in records)
    assert records[-1].sent_s - start_s >= 0.25


def test_processes_share_the_same_requests() -> None:
    plan = LoadPlan(Target("http://x", "m"), rate_per_s=5.0, num_requests=11, inputs=LengthRange(3, 9), seed=4)
    whole = plan.requests()
    parts = [request for process in range(3) for request in plan.requests(process, 3)]
    parts.sort(key=lambda request: request.index)
    assert [(r.index, r.scheduled_s, r.prompt.tolist()) for r in parts] == [
        (r.index, r.scheduled_s, r.prompt.tolist()) for r in whole
    ]


def test_a_trace_keeps_lengths_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [(2000, 30), (0, 10), (1000, 20)]
    path.write_text("".join(f'{{"timestamp": {t}, "input_length": {n}, "output_length": 1}}\n' for t, n in lines))
    plan = LoadPlan(Target("http://x", "m"), Arrival.TRACE, None, num_requests=None, trace=TraceOptions(path))
    assert [(r.scheduled_s, len(r.prompt)) for r in plan.requests()] == [(0.0, 10), (1.0, 20), (2.0, 30)]


def test_a_warm_up_that_fails_ends_the_run(server: FakeServer) -> None:
    plan = LoadPlan(
        Target(server.url, "m"), rate_per_s=math.inf, num_requests=1, num_warmup=1, body={"fault": "status"}
    )
    with pytest.raises(ClientFailed, match="warm-up"):
        run_load(plan)


def test_chat_bodies_and_addresses() -> None:
    target = Target("https://host:1/base/v1/", "m", "chat", {"Authorization": "Bearer x"})
    assert target.path == "/base/v1/chat/completions"
    assert b"\r\nHost: host:1\r\n" in target.head(5)
    assert b"\r\nAuthorization: Bearer x\r\n" in target.head(5)
    body = json.loads(OutgoingRequest(0, 0.0, "hi", 1, 4, options={"top_k": 3}).body(target))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["top_k"] == 3
    with pytest.raises(ValueError, match="chat"):
        LoadPlan(target)


@pytest.mark.parametrize(
    "arguments", ["", "--rate 0", "--rate 1 --goodput itl:3", "--arrival trace", "--trace /no/such.csv --rate 1"]
)
def test_wrong_arguments(arguments: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--url", "http://127.0.0.1:1", "--model", "m", *arguments.split()])
    assert exit_.value.code == 2


async def _send(target: Target, stream: bool = True, options: dict[str, str] | None = None) -> RequestRecord:
    client = Client(target, timeout_s=60)
    record = await client.send(OutgoingRequest(0, time.monotonic(), [1, 2], 2, 4, stream, options or {}))
    client.close()
    return record


def test_bench_of_the_command_line_asks_the_server_what_it_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        arguments = ["bench", f"{server.url}/v1", "--num-requests", "3", "--rate", "inf", "--output-len", "4"]
        assert splitserve([*arguments, "--warmup", "0"]) == 0
    out, err = capsys.readouterr()
    assert err == f"3 requests to a-model at {server.url}, the last one after 0 s\n"
    assert "\n3 of 3 requests in " in out
    assert [body["model"] for body in server.bodies] == ["a-model"] * 3


def test_bench_says_what_is_wrong_in_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, error in (
        ([server.url, "--goodput", "tps:3"], "a goodput limit is one of"),
        (["host:port"], "host:port: is no address of a server"),
        ([server.url, "--trace", "/nowhere.csv"], "/nowhere.csv"),
    ):
        assert splitserve(["bench", *arguments]) == 1
        err = capsys.readouterr().err
        assert error in err
        assert err.count("\n") == 1


def test_without_a_word_it_is_a_small_run() -> None:
    parser = argparse.ArgumentParser()
    add_bench_options(parser)
    options = with_bench_defaults(parser.parse_args([]))
    assert (options.url, options.rate, options.num_requests) == ("http://127.0.0.1:8000", 1.0, 30)
    options = with_bench_defaults(parser.parse_args(["--arrival", "trace", "--trace", "x.csv"]))
    assert (options.rate, options.num_requests) == (None, None)
