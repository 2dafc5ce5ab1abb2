"""python -m benchmarks.gpu.handoff [--device cuda|cpu] [--mib 2 32 256] [--repeats 20]: reads between two processes.

Both have a pool on the same device, on one card, or the source on card N (--source-card N, each seeing its own only, as
Ray's replicas do; this one has the first of CUDA_VISIBLE_DEVICES). This one reads from the other by the KvTransport
that serves, in blocks of --block-mib (2: those of Llama-3.1-8B, 16 tokens). Prints, for each size, the first read and
the median and best of those after it, then what a probe makes of the pair, as a decode replica does when it meets a
prefill replica.
Raises if the bytes are not the source's. UCX's variables are taken from the environment, as always: with
UCX_CUDA_IPC_ENABLE_GET_ZCOPY=n a card without NVLink shows what UCX does by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from cluster.load.tables import table
from replicas.kv.kv_transport import KvTransport, ReadHandle, ReadState
from replicas.kv.pair_rate import PairRate
from replicas.kv.probe import Probe
from replicas.kv.transport_opener import transport_opener
from replicas.messages import TransferPeer
from replicas.settings import TransferSettings

MIB = 1024**2
HEADER = ("MiB", "first, ms", "median, ms", "best, ms", "median, GiB/s")

_ROOT = Path(__file__).parents[2]
_SETTINGS = TransferSettings("UCX", 30.0, verify_digest=True, net_devices=None, max_bytes_in_flight=1 << 30)
_SOURCE_POLL_S = 0.001  # as the transfer thread, while something is open
_START_S = 120.0
_READ_S = 60.0


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Of reads of one size; the first may have to open the source's memory."""

    num_bytes: int
    first_s: float
    later_s: tuple[float, ...]

    def row(self) -> tuple[str, ...]:
        """As HEADER says."""
        typical_s = median(self.later_s)
        ms = (f"{1e3 * seconds:.3f}" for seconds in (self.first_s, typical_s, min(self.later_s)))
        return (f"{self.num_bytes / MIB:g}", *ms, f"{self.num_bytes / typical_s / 1024**3:.2f}")


class HandoffPair:
    """A source in a process of its own and a reader in this one. Blocks until both stand; raises when one can't."""

    def __init__(self, device: str, num_blocks: int, block_bytes: int, source_card: str | None = None) -> None:
        """source_card: the only one that the source sees; None: the same as here."""
        self.pool = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        command = [sys.executable, "-m", "benchmarks.gpu.handoff", "--be-source", "--device", device]
        command += ["--num-blocks", str(num_blocks), "--block-bytes", str(block_bytes)]
        cards = {} if source_card is None else {"CUDA_VISIBLE_DEVICES": source_card}
        self._source = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=os.environ | cards | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
            text=True,
        )
        self.reader = _open(self.pool, "reader")
        try:
            self.peer = self._hear_of_peer()
            self.reader.load_peer(self.peer)
        except BaseException:
            self.close()
            raise

    def read(self, num_blocks: int) -> float:
        """The first blocks of the source, over those here. Seconds; raises RuntimeError when it fails."""
        block_ids = range(num_blocks)
        started_s = time.perf_counter()
        handle = self.reader.start_read(self.peer, block_ids, block_ids, b"done")
        return self._await(handle, started_s)

    def times(self, num_blocks: int, repeats: int) -> ReadTimes:
        num_bytes = num_blocks * self.pool.shape[1]
        first_s = self.read(num_blocks)
        return ReadTimes(num_bytes, first_s, tuple(self.read(num_blocks) for _ in range(repeats)))

    def probe(self) -> PairRate:
        """As a decode replica measures it."""
        probe = Probe(self.pool.nbytes)
        while probe.next_bytes is not None:
            started_s = time.perf_counter()
            probe.took(self._await(self.reader.start_probe(self.peer, probe.next_bytes), started_s))
        rate = probe.rate(self.peer.replica_id)
        assert rate is not None
        return rate

    def check(self, num_blocks: int) -> None:
        """Raises AssertionError unless these blocks are the source's, and those behind them are as they were."""
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)
        expected = _source_blocks(num_blocks, self.pool.shape[1], self.pool.device)
        assert torch.equal(self.pool[:num_blocks], expected), "the bytes that came are not the source's"
        assert not self.pool[num_blocks:].any(), "something landed behind the blocks that were read"

    def end_source(self) -> None:
        """Blocks until its process has ended."""
        if self._source.stdin is not None:
            self._source.stdin.close()
        self._source.wait(30.0)

    def close(self) -> None:
        self.end_source()
        self.reader.close()

    def _await(self, handle: ReadHandle, started_s: float) -> float:
        while (state := self.reader.poll_read(handle)) is ReadState.READING:
            if time.perf_counter() - started_s > _READ_S:
                raise RuntimeError(f"a read did not end within {_READ_S:g} s")
        took_s = time.perf_counter() - started_s
        if state is not ReadState.DONE:
            raise RuntimeError(f"a read: {state.value}")
        self.reader.release_read(handle)
        return took_s

    def _hear_of_peer(self) -> TransferPeer:
        assert self._source.stdout is not None
        give_up_s = time.monotonic() + _START_S
        for line in self._source.stdout:  # NIXL's log is there too
            if line.startswith("{"):
                return TransferPeer.from_metadata(json.loads(line))
            if time.monotonic() > give_up_s:
                break
        raise RuntimeError("the source did not start; what it said is above")


def be_source(device: str, num_blocks: int, block_bytes: int) -> None:
    """Until standard input ends: offer a pool, and poll as an engine does."""
    pool = _source_blocks(num_blocks, block_bytes, torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()
    transport = _open(pool, "source")
    print(json.dumps(transport.local_peer().to_metadata()), flush=True)
    while not select.select([sys.stdin], [], [], _SOURCE_POLL_S)[0]:
        transport.poll_notifications()
    transport.close()


def _open(pool: torch.Tensor, replica_id: str) -> KvTransport:
    return transport_opener(_SETTINGS.backend)(pool, replica_id, "1", "benchmark", _SETTINGS)


def _source_blocks(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes]: no byte is 0, and neighbouring blocks differ everywhere."""
    blocks = torch.empty(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    pattern = torch.arange(block_bytes, dtype=torch.int32, device=device) // 251
    for number in range(num_blocks):  # one at a time: as integers a pool would be several times as large
        blocks[number] = (pattern + number) % 255 + 1
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mib", type=int, nargs="+", default=[2, 32, 256])
    parser.add_argument("--block-mib", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--source-card")
    parser.add_argument("--be-source", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--num-blocks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--block-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_source:
        be_source(options.device, options.num_blocks, options.block_bytes)
        return
    pair = HandoffPair(
        options.device, max(options.mib) // options.block_mib + 1, options.block_mib * MIB, options.source_card
    )
    try:
        rows = []
        for mib in sorted(options.mib):
            rows.append(pair.times(mib // options.block_mib, options.repeats).row())
            pair.check(mib // options.block_mib)
        rate = pair.probe()
    finally:
        pair.close()
    zcopy = os.environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "(not set)")
    print(f"{options.device}, UCX_CUDA_IPC_ENABLE_GET_ZCOPY={zcopy}, blocks of {options.block_mib} MiB")
    print(table(HEADER, rows))
    print(f"probe: {rate.bytes_per_s / 1e9:.3g} GB/s, {1e3 * rate.latency_s:.3g} ms, pace: {rate.pace}")


if __name__ == "__main__":
    main()
