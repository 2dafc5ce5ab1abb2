"""Pools on the same machine are opened and read without UCX, by a played driver; and let go of with their owner."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.kv import near_pools as near_pools_module
from replicas.kv import nixl_transport
from replicas.kv.cuda_ipc import Copy, CudaIpc, Exported, NoCudaIpc
from replicas.kv.kv_transport import PeerUnreachable, ReadState
from replicas.kv.near_pools import NearAddress, NearPools
from replicas.kv.nixl_address import NixlAddress
from replicas.kv.nixl_transport import NixlTransport

SHAPE = (64, 2, 2, 16, 2, 32)
AWAY = 1 << 44  # what is opened lies so far from where it lives


@dataclass
class PlayedCopying:
    copies: Sequence[Copy]
    driver: PlayedDriver
    num_polls: int = 3

    def is_over(self) -> bool:
        """Bytes come late: with the last poll."""
        if self.driver.is_broken:
            raise NoCudaIpc("an illegal address was encountered")
        self.num_polls -= 1
        if not self.num_polls:
            for to, origin, num_bytes in self.copies:
                ctypes.memmove(to, origin - AWAY, num_bytes)
        return self.num_polls <= 0


class PlayedDriver:
    """Keeps books of what is open. can_open: else opening fails."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.num_copies = 0
        self.can_open, self.is_broken = True, False

    def export(self, address: int) -> Exported:
        return Exported((address - 256).to_bytes(64, "little"), 256)

    def open(self, exported: Exported) -> int:
        if not self.can_open:
            raise NoCudaIpc("cuIpcOpenMemHandle_v2: error 201, invalid device context")
        address = int.from_bytes(exported.handle, "little") + exported.offset + AWAY
        self.opened.append(address)
        return address

    def close(self, exported: Exported, address: int) -> None:
        self.opened.remove(address)

    def copy(self, copies: Sequence[Copy]) -> PlayedCopying:
        self.num_copies += len(copies)
        return PlayedCopying(copies, self)


class System:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: tuple[str, str] = ("here", "here")) -> None:
        self.driver, self.pools = PlayedDriver(), [torch.randn(SHAPE), torch.zeros(SHAPE)]
        ends = []
        for pool, machine, name in zip(self.pools, machines, ("prefill-0", "decode-0"), strict=True):
            near = NearPools(self.driver, pool.data_ptr(), machine)  # type: ignore[arg-type]
            monkeypatch.setattr(nixl_transport, "near_pools", lambda _, near=near: near)
            ends.append(NixlTransport(pool, name, "a1", "f"))
        self.source, self.reader = ends
        self.peer = self.source.local_peer()

    def meet(self) -> None:
        self.source.load_peer(self.reader.local_peer())
        self.reader.load_peer(self.peer)

    def read(self) -> tuple[ReadState, list[tuple[str, bytes]]]:
        """Three blocks, in two pieces."""
        handle = self.reader.start_read(self.peer, [10, 11, 3], [5, 6, 60], b"done")
        mail: list[tuple[str, bytes]] = []

        def is_over() -> bool:
            mail.extend(self.source.poll_notifications())
            self.reader.poll_notifications()  # a first message needs both ends
            state = self.reader.poll_read(handle)
            return state in (ReadState.FAILED, ReadState.UNKNOWN) or (state is ReadState.DONE and bool(mail))

        until(is_over)
        state = self.reader.poll_read(handle)
        if state is not ReadState.UNKNOWN:
            self.reader.release_read(handle)
        return state, mail

    @property
    def has_come(self) -> bool:
        source, pool = self.pools
        others = [block for block in range(64) if block not in (10, 11, 3)]
        return torch.equal(pool[[10, 11, 3]], source[[5, 6, 60]]) and not pool[others].any()


def until(condition: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.0005)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    system = System(monkeypatch)
    yield system
    system.reader.close()
    system.source.close()
    assert system.driver.opened == []


def test_a_read_is_the_driver_s_and_its_notice_comes_behind_the_bytes(system: System) -> None:
    system.meet()
    assert system.driver.opened == [], "who has not read yet holds nobody's memory"
    assert system.read() == (ReadState.DONE, [("decode-0-a1", b"done")])
    assert system.has_come
    assert system.driver.num_copies == 2
    assert system.driver.opened == [system.pools[0].data_ptr() + AWAY]


def test_nothing_is_said_before_the_bytes_are_there(system: System) -> None:
    system.meet()
    handle = system.reader.start_read(system.peer, [0], [1], b"done")
    assert system.reader.poll_read(handle) is ReadState.READING
    assert system.source.poll_notifications() == []
    assert not system.pools[1].any()
    with pytest.raises(ValueError, match="in flight"):
        system.reader.release_read(handle)
    until(lambda: system.reader.poll_read(handle) is ReadState.DONE)
    assert torch.equal(system.pools[1][0], system.pools[0][1])
    until(lambda: system.reader.poll_notifications() or system.source.poll_notifications())


def test_who_is_forgotten_is_let_go_of_once_no_read_needs_it(system: System) -> None:
    system.meet()
    handle = system.reader.start_read(system.peer, [0], [1], b"done")
    system.reader.remove_peer(system.peer.agent_name)
    assert len(system.driver.opened) == 1
    until(lambda: system.reader.poll_read(handle) is not ReadState.READING)
    system.reader.release_read(handle)
    assert system.driver.opened == []
    with pytest.raises(PeerUnreachable):
        system.reader.start_read(system.peer, [0], [1], b"done")


def test_a_pool_that_cannot_be_opened_is_read_by_ucx(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.driver.can_open = False
    system.meet()
    assert system.read() == (ReadState.DONE, [("decode-0-a1", b"done")])
    assert system.has_come
    assert system.driver.num_copies == 0
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["no_cuda_ipc"]
    assert system.read()[0] is ReadState.DONE
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["no_cuda_ipc"], "tried once"


def test_a_pool_on_another_machine_is_read_by_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, ("there", "here"))
    system.meet()
    assert system.read()[0] is ReadState.DONE
    assert system.has_come
    assert system.driver.num_copies == 0
    system.reader.close()
    system.source.close()


@pytest.mark.parametrize("near", [b"", b"junk", NearAddress("here", b"short", 0).encode()[:-1]])
def test_what_is_no_address_is_read_by_ucx(system: System, near: bytes) -> None:
    address = replace(NixlAddress.decode(system.peer.address), near=near)
    system.peer = replace(system.peer, address=address.encode())
    system.meet()
    assert system.read()[0] is ReadState.DONE
    assert system.has_come
    assert system.driver.num_copies == 0


def test_a_device_that_fails_leaves_it_unknown_what_will_land(system: System) -> None:
    system.meet()
    system.driver.is_broken = True
    assert system.read() == (ReadState.UNKNOWN, [])
    system.reader._reads.clear()  # nothing lands any more here


def test_a_probe_goes_the_same_way(system: System) -> None:
    system.meet()
    handle = system.reader.start_probe(system.peer, 4096)
    until(lambda: system.reader.poll_read(handle) is ReadState.DONE)
    system.reader.release_read(handle)
    assert system.driver.num_copies == 1
    assert bytes(system.reader._scratch[:4096]) == ctypes.string_at(system.pools[0].data_ptr(), 4096)
    assert system.source.poll_notifications() == []


class Library:
    """libcuda, as far as it is called. failing: a call that gives an error."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, [getattr(one, "value", None) for one in arguments]))
            if name == "cuMemGetAddressRange_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = arguments[2].value - 512
            if name == "cuIpcGetMemHandle":
                ctypes.memmove(arguments[0], bytes(range(1, 65)), 64)
            if name == "cuIpcOpenMemHandle_v2":
                assert ctypes.string_at(ctypes.byref(arguments[1]), 64) == bytes(range(1, 65))
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = 1 << 40
            return 201 if name == self._failing else 0

        return call


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 77

    class Event:
        def record(self, stream: Stream) -> None: ...

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.usefixtures("no_card")
def test_the_driver_s_calls() -> None:
    library = Library()
    ipc = CudaIpc(torch.device("cuda", 0), library)
    exported = ipc.export(4096)
    assert exported == Exported(bytes(range(1, 65)), 512)
    address = ipc.open(exported)
    assert address == (1 << 40) + 512
    assert ipc.copy([Copy(1, address, 10), Copy(2, address + 5, 20), Copy(3, address, 30)]).is_over()
    ipc.close(exported, address)
    copies = [values for name, values in library.calls if name == "cuMemcpyDtoDAsync_v2"]
    assert copies == [[1, address, 10, 77], [2, address + 5, 20, 77], [3, address, 30, 77]]
    assert library.calls[-1] == ("cuIpcCloseMemHandle", [1 << 40])
    with pytest.raises(NoCudaIpc, match="a handle of 3 bytes"):
        ipc.open(Exported(b"abc", 0))


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize("failing", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle"])
def test_what_the_driver_refuses_is_said_by_its_call(failing: str) -> None:
    with pytest.raises(NoCudaIpc, match=f"{failing}: error 201"):
        CudaIpc(torch.device("cuda", 0), Library(failing)).export(4096)


def test_where_nobody_can_tell_the_machine_no_pool_is_taken_for_a_near_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two machines without a name would have the same one."""
    monkeypatch.setattr(near_pools_module, "_BOOT_ID", tmp_path / "there is none")
    monkeypatch.setattr(near_pools_module, "CudaIpc", lambda device: PlayedDriver())
    pool: Any = SimpleNamespace(is_cuda=True, device="cuda", data_ptr=lambda: 4096)
    assert near_pools_module.machine_id() == ""
    assert near_pools_module.near_pools(pool) is None
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["no_cuda_ipc"]
    (tmp_path / "boot_id").write_text("5e4d\n")
    monkeypatch.setattr(near_pools_module, "_BOOT_ID", tmp_path / "boot_id")
    near = near_pools_module.near_pools(pool)
    assert near is not None
    assert near.may_open(near.address)


def test_who_can_neither_be_opened_nor_read_by_ucx_is_unreachable_until_it_can(system: System) -> None:
    """As one whose process has ended between the first word and the first read."""
    address = replace(NixlAddress.decode(system.peer.address), agent_metadata=b"junk")
    system.peer = replace(system.peer, address=address.encode())
    system.meet()
    system.driver.can_open = False
    for _ in range(2):
        with pytest.raises(PeerUnreachable, match="metadata of prefill-0-a1 is unusable"):
            system.reader.start_read(system.peer, [10], [5], b"done")
    assert system.driver.opened == []
    assert not system.pools[1].any()
    system.driver.can_open = True
    assert system.read() == (ReadState.DONE, [("decode-0-a1", b"done")])
    assert system.has_come
