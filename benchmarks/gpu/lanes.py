"""Two lanes on one card, without an engine: what disjoint multiprocessors give, and whether graphs keep to them.

    python lanes.py            # needs torch with CUDA, nothing else

Prints a line of JSON for each measurement. Every part stands alone: what a driver does not have is said, and the rest
goes on.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

_RESOURCE_BYTES = 144  # sizeof(CUdevResource)
_SM_COUNT_AT = 96  # its sm.smCount
_SM_RESOURCE = 1
_GREEN_DEFAULT_STREAM = 1
_NON_BLOCKING = 1


def say(what: str, **values: Any) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


class Driver:
    """The few calls of libcuda that make green contexts."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value
        self.device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self.device), 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {code} {text.value!r}")

    def split(self, num_first: int) -> tuple[bytes, bytes]:
        whole = ctypes.create_string_buffer(_RESOURCE_BYTES)
        self._call("cuDeviceGetDevResource", self.device, whole, _SM_RESOURCE)
        first, rest = (ctypes.create_string_buffer(2 * _RESOURCE_BYTES) for _ in range(2))
        count = ctypes.c_uint(1)
        self._call(
            "cuDevSmResourceSplitByCount", first, ctypes.byref(count), whole, rest, ctypes.c_uint(0),
            ctypes.c_uint(num_first),
        )  # fmt: skip
        return first.raw[:_RESOURCE_BYTES], rest.raw[:_RESOURCE_BYTES]

    @staticmethod
    def size(resource: bytes) -> int:
        return int.from_bytes(resource[_SM_COUNT_AT : _SM_COUNT_AT + 4], "little")

    def stream(self, resource: bytes) -> torch.cuda.ExternalStream:
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        buffer = ctypes.create_string_buffer(resource, _RESOURCE_BYTES)
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), buffer, ctypes.c_uint(1))
        self._call(
            "cuGreenCtxCreate", ctypes.byref(context), description, self.device, ctypes.c_uint(_GREEN_DEFAULT_STREAM)
        )
        self._call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), 0)
        return torch.cuda.ExternalStream(stream.value)


@contextmanager
def part(name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
        say("part done", part=name, seconds=time.monotonic() - started)
    except Exception as error:
        say("part failed", part=name, error=f"{type(error).__name__}: {error}")
        traceback.print_exc()


def graph_on(stream: torch.cuda.Stream, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Captured on the stream."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    torch.cuda.synchronize()
    return graph


def timed(stream: torch.cuda.Stream, run: Callable[[], Any], count: int) -> float:
    """Median ms of a run by the device's clock, back to back."""
    with torch.cuda.stream(stream):
        run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


class Beside:
    """Runs something over and over on a stream, from another thread, waiting for each as a lane's thread does."""

    def __init__(self, stream: torch.cuda.Stream, run: Callable[[], Any]) -> None:
        self.times: list[float] = []
        self._stop = threading.Event()
        self._started = threading.Event()
        self._stream, self._run_it = stream, run
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beside:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            before = torch.cuda.Event(enable_timing=True)
            before.record()
            while not self._stop.is_set():
                self._run_it()
                after = torch.cuda.Event(enable_timing=True)
                after.record()
                after.synchronize()
                self.times.append(before.elapsed_time(after))
                before = after
                if len(self.times) == 2:
                    self._started.set()

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times[1:] or self.times)


class Products:
    """64 products of 4096 x 14336: the table of one-card.md."""

    def __init__(self) -> None:
        self.weights = [torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(64)]
        self.few = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
        self.many = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)

    def decode(self) -> None:
        for weight in self.weights:
            F.linear(self.few, weight)

    def prefill(self) -> None:
        for weight in self.weights:
            F.linear(self.many, weight)


class Attention:
    """Prompts' attention by cuDNN, 32 times, as in a layer of Llama-8B."""

    def __init__(self) -> None:
        make = lambda heads: torch.randn(1, heads, 2048, 128, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = make(32), make(8), make(8)

    def run(self) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            for _ in range(32):
                F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=True)


def main() -> None:
    torch.set_grad_enabled(False)
    driver = Driver()
    num_all = torch.cuda.get_device_properties(0).multi_processor_count
    say("card", name=torch.cuda.get_device_name(), torch=torch.__version__, driver=driver.version, sms=num_all)
    with part("torch's green contexts"):
        import torch.cuda.green_contexts as green

        free_before = torch.cuda.mem_get_info()[0]
        context = green.GreenContext.create(num_sms=40, device_id=0)
        mib = (free_before - torch.cuda.mem_get_info()[0]) / 2**20
        say("torch green context", has=[n for n in dir(context) if not n.startswith("_")], mib=mib)
    lanes: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
    with part("streams by ctypes"):
        for num_decode in (16, 24, 32, 40, 48, 64, 84, 100):
            free_before, started = torch.cuda.mem_get_info()[0], time.monotonic()
            first, rest = driver.split(num_decode)
            pair = driver.stream(first), driver.stream(rest)
            lanes[num_decode] = pair
            mib = (free_before - torch.cuda.mem_get_info()[0]) / 2**20
            say(
                "split", asked=num_decode, decode=driver.size(first), prefill=driver.size(rest), mib_of_both=mib,
                ms=(time.monotonic() - started) * 1e3,
            )  # fmt: skip
    whole = torch.cuda.Stream()
    products = Products()
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
    with part("whole card"):
        decode, prefill = graph_on(whole, products.decode), graph_on(whole, products.prefill)
        graphs[num_all] = decode, prefill
        say("alone", sms=num_all, decode_ms=timed(whole, decode.replay, 60), prefill_ms=timed(whole, prefill.replay, 8))
    with part("lanes"):
        for num_decode, (first, rest) in lanes.items():
            started = time.monotonic()
            decode, prefill = graph_on(first, products.decode), graph_on(rest, products.prefill)
            capture_s = time.monotonic() - started
            graphs[num_decode] = decode, prefill
            alone = timed(first, decode.replay, 60), timed(rest, prefill.replay, 8)
            with Beside(rest, prefill.replay) as prompts:
                decode_beside = timed(first, decode.replay, 120)
            with Beside(first, decode.replay) as rows:
                prefill_beside = timed(rest, prefill.replay, 8)
            say(
                "lanes", decode_sms=num_decode, prefill_sms=num_all - num_decode, decode_alone_ms=alone[0],
                prefill_alone_ms=alone[1], decode_beside_ms=decode_beside, prefill_beside_ms=prefill_beside,
                decode_by_thread_ms=rows.median_ms, prefill_by_thread_ms=prompts.median_ms, capture_s=capture_s,
            )  # fmt: skip
    with part("where a graph runs"):
        first, _ = lanes[40]
        say(
            "graph of 40 on", own_ms=timed(first, graphs[40][0].replay, 40),
            whole_ms=timed(whole, graphs[40][0].replay, 40),
            whole_graph_on_40_ms=timed(first, graphs[num_all][0].replay, 40),
        )  # fmt: skip
    with part("eager on a lane"):
        first, rest = lanes[40]
        say("eager", decode_ms=timed(first, products.decode, 20), prefill_ms=timed(rest, products.prefill, 6))
    with part("cuDNN attention on a lane"):
        attention = Attention()
        say("attention", whole_ms=timed(whole, graph_on(whole, attention.run).replay, 10))
        for num_decode in (40, 64):
            rest = lanes[num_decode][1]
            captured = graph_on(rest, attention.run)
            with Beside(lanes[num_decode][0], graphs[num_decode][0].replay):
                beside = timed(rest, captured.replay, 10)
            say("attention", sms=num_all - num_decode, alone_ms=timed(rest, captured.replay, 10), beside_ms=beside)
    with part("whole card, then a share, then the whole card: one lane's order by events"):
        first, _ = lanes[40]
        with torch.cuda.stream(whole):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
            events[0].record()
        at = whole
        for index, event in enumerate(events[1:]):
            stream, graph = ((whole, graphs[num_all][0]), (first, graphs[40][0]))[index % 2]
            stream.wait_stream(at)
            with torch.cuda.stream(stream):
                graph.replay()
                event.record()
            at = stream
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        say("switch", whole_ms=statistics.median(times[2::2]), share_ms=statistics.median(times[1::2]))
    with part("decode on the whole card while a prompt begins on its share"):
        rest = lanes[40][1]
        with Beside(rest, graphs[40][1].replay) as prompts:
            say("whole beside prompt", decode_ms=timed(whole, graphs[num_all][0].replay, 60))
        say("whole beside prompt", prefill_ms=prompts.median_ms)
    with part("compiled on a lane"):
        compiled = torch.compile(lambda x: F.silu(x) * x + 1.0)
        x = torch.randn(2048, 14336, device="cuda", dtype=torch.bfloat16)
        run = lambda: compiled(x)  # noqa: E731
        say("compiled", whole_ms=timed(whole, run, 30), lane_ms=timed(lanes[40][0], run, 30))
    say("memory", free_gib=torch.cuda.mem_get_info()[0] / 2**30, reserved_gib=torch.cuda.memory_reserved() / 2**30)


if __name__ == "__main__":
    main()
