"""Responses cut into pieces at every place: what is read must not depend on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.load.answer_reader import AnswerReader
from cluster.load.http_connection import BrokenResponse, HttpConnection
from cluster.load.request_record import RequestRecord

CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"5\r\nhello\r\nA;x=1\r\n, world!!\n\r\n0\r\nTrailer: 1\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\nhello, world!!\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello, world!!\n"

STREAM = (
    b": ping\n\n"
    b'data: {"choices": [{"text": "", "delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"text": " a"}], "usage": null}\r\n\r\n'
    b'data:{"choices": [{"delta": {"content": "b"}}]}\n\n'
    b'data: {"choices": [{"text": "", "token_ids": [5]}]}\n\n'
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
    b"data: [DONE]\n\n"
)


class _FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


async def _exchange(pieces: list[bytes], then_close: bool = False) -> tuple[HttpConnection, bytes]:
    """The connection after it got these pieces, and the body it passed on. Raises BrokenResponse."""
    connection = HttpConnection()
    connection.connection_made(_FakeTransport())
    body: list[bytes] = []
    task = asyncio.create_task(connection.exchange(b"", lambda piece, _: body.append(piece)))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if then_close:
        connection.connection_lost(None)
    async with asyncio.timeout(120):
        await task
    return connection, b"".join(body)


@pytest.mark.parametrize("response", [CHUNKED, LENGTH, CONTINUED], ids=["chunked", "length", "continued"])
async def test_any_pieces(response: bytes) -> None:
    for cut in range(1, len(response)):
        connection, body = await _exchange([response[:cut], response[cut:]])
        assert body == b"hello, world!!\n"
        assert connection.status == 200
        assert connection.is_reusable
    _, body = await _exchange([bytes([byte]) for byte in response])
    assert body == b"hello, world!!\n"


async def test_a_body_that_ends_with_the_connection() -> None:
    connection, body = await _exchange([UNTIL_CLOSE], then_close=True)
    assert body == b"hello, world!!\n"
    assert not connection.is_reusable


async def test_connection_close_is_not_reused() -> None:
    connection, _ = await _exchange([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"])
    assert not connection.is_reusable


@pytest.mark.parametrize("cut", [10, 60, len(CHUNKED) - 1])
async def test_a_response_that_is_cut_is_broken(cut: int) -> None:
    with pytest.raises(BrokenResponse, match="before the response was complete"):
        await _exchange([CHUNKED[:cut]], then_close=True)


@pytest.mark.parametrize(
    "response",
    [b"nonsense\r\n\r\n", CHUNKED_HEAD + b"xyz\r\n", LENGTH + b"more"],
    ids=["status line", "chunk size", "more than its length"],
)
async def test_malformed(response: bytes) -> None:
    with pytest.raises(BrokenResponse, match="malformed"):
        await _exchange([response])


def _read(pieces: list[bytes], streamed: bool = True) -> RequestRecord:
    record = RequestRecord(0, 0.0, num_input_tokens=1, num_wanted_tokens=3)
    reader = AnswerReader(record, streamed)
    for number, piece in enumerate(pieces):
        reader.feed(piece, float(number))
    reader.finish()
    return record


def test_a_stream_in_any_pieces() -> None:
    for cut in range(1, len(STREAM)):
        record = _read([STREAM[:cut], STREAM[cut:]])
        assert record.error is None
        assert len(record.token_times_s) == 3
        assert (record.num_input_tokens, record.num_output_tokens) == (4, 3)
        assert record.finish_reason == "length"


def test_times_are_those_of_the_piece_that_completed_the_event() -> None:
    assert list(_read([line + b"\n" for line in STREAM.split(b"\n")]).token_times_s) == [4.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (STREAM.replace(b"data: [DONE]\n\n", b""), "without [DONE]"),
        (STREAM.replace(b": ping", b'data: {"error": {"message": "no"}}'), "an error in the answer"),
        (STREAM.replace(b": ping", b"event: error\ndata: {}"), "SSE error event"),
        (STREAM.replace(b": ping", b"data: {oops"), "not JSON"),
        (b"data: [DONE]\n\n", "without tokens"),
        (b"", "without [DONE]"),
    ],
)
def test_what_is_no_success(stream: bytes, error: str) -> None:
    record = _read([stream])
    assert record.error is not None
    assert error in record.error


def test_without_usage_events_are_counted() -> None:
    assert _read([b'data: {"choices": [{"text": "x"}]}\n\n' * 5 + b"data: [DONE]\n\n"]).num_output_tokens == 5


def test_a_whole_answer() -> None:
    answer = b'{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}'
    record = _read([answer[:20], answer[20:]], streamed=False)
    assert (record.error, record.num_output_tokens, record.finish_reason) == (None, 7, "stop")
    assert _read([b'{"error": "no"}'], streamed=False).error is not None
    assert _read([answer[:-3]], streamed=False).error is not None
