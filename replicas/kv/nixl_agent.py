"""NIXL's own calls, for `nixl_transport`: their ways of failing in our words.

What NIXL 1.5.1 does, seen or read in its source, and what follows from it here:
- Its progress thread burns a whole core (measured), so there is none: UCX progresses when we poll. So a first
  message goes out only while its sender keeps polling, and emulated reads (shared memory, TCP) need the source's polls.
- Releasing a handle that is in flight says OK and recalls nothing, and so does removing its peer: the handle then
  reports NOT_FOUND while bytes may still land. So neither is done before the read's end, and NOT_FOUND is no end.
- A dead peer: the first message may be lost without an error, later ones raise; handles in flight fail on their own,
  all with REMOTE_DISCONNECT.
- Of a read's descriptors it keeps the last one's request, and a flush of the connection behind them all
  (ucx_backend.cpp, sendXferRange). DONE is the flush's. REMOTE_DISCONNECT ends them all: UCX completes what was posted
  on a broken connection only when its lanes are torn down (ucp_ep.c, ucp_ep_discard_lanes). Any other error is that of
  one part: the others go on, forgotten by NIXL, which stores the error and tells it from then on.
- Importing it closes every log handler of the process, which is not to happen (`kept_logging`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch

from replicas.kept_logging import kept_logging
from replicas.kv.kv_transport import PeerUnreachable, ReadState

with kept_logging():
    from nixl_cu13._api import nixl_agent, nixl_agent_config
    from nixl_cu13._bindings import nixlRemoteDisconnectError

_BACKEND = "UCX"
_STATES = {"PROC": ReadState.READING, "DONE": ReadState.DONE}

Region = tuple[int, int, int]  # address, bytes, device
MemoryType = Literal["DRAM", "VRAM"]

logger = logging.getLogger(__name__)


class NixlAgent:
    """One agent with UCX. Environment variables are read when it is made, which takes half a second."""

    def __init__(self, name: str, mem_type: MemoryType) -> None:
        """Raises RuntimeError where UCX is not to be had."""
        self._mem_type = mem_type
        self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
        if _BACKEND not in self._agent.backends:
            raise RuntimeError("NIXL has no UCX backend here")
        self._registrations: list[Any] = []

    def register(self, memory: torch.Tensor) -> None:
        """memory: contiguous, must outlive this."""
        region = (memory.data_ptr(), memory.nbytes, 0 if memory.device.type == "cpu" else memory.get_device(), "")
        self._registrations.append(self._agent.register_memory([region], self._mem_type))

    def metadata(self) -> bytes:
        """How to connect, and what has been registered until now."""
        return bytes(self._agent.get_agent_metadata())

    def connection(self) -> bytes:
        """How to connect, without a word of memory."""
        nothing = self._agent.get_reg_descs([(0, 0, 0, "")], self._mem_type)  # it makes no empty list
        nothing.clear()
        return bytes(self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True, backends=[_BACKEND]))

    def load(self, agent_name: str, metadata: bytes) -> str:
        """Whose metadata they are; of one that is loaded they are added. Raises PeerUnreachable for unusable ones."""
        try:
            return _text(self._agent.add_remote_agent(metadata))
        except Exception as error:
            raise PeerUnreachable(f"metadata of {agent_name} is unusable: {error}") from error

    def unload(self, agent_name: str) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:
            logger.warning("NIXL did not remove %s: %s", agent_name, error)

    def notify(self, agent_name: str, payload: bytes) -> None:
        """Raises PeerUnreachable."""
        try:
            self._agent.send_notif(agent_name, payload)
        except Exception as error:
            raise PeerUnreachable(f"cannot notify {agent_name}: {error}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        mail: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        return [(_text(sender), bytes(payload)) for sender, payloads in mail.items() for payload in payloads]

    def read(
        self, agent_name: str, local: Sequence[Region], remote: Sequence[Region], there: MemoryType, notice: bytes
    ) -> tuple[Any, ReadState]:
        """Start one; notice follows it. A handle, and where it stands. Raises PeerUnreachable when the peer is gone:
        nothing was posted, or it has ended."""
        agent = self._agent
        try:
            descriptors = agent.get_xfer_descs(local, self._mem_type), agent.get_xfer_descs(remote, there)
            handle = agent.initialize_xfer("READ", *descriptors, agent_name, notice)
        except Exception as error:
            raise PeerUnreachable(f"cannot prepare a read from {agent_name}: {error}") from error
        try:
            return handle, _STATES[agent.transfer(handle)]
        except nixlRemoteDisconnectError as error:
            self.release(handle)
            raise PeerUnreachable(f"{agent_name} is gone: {error}") from error
        except Exception as error:
            return handle, unknown(agent_name, error)  # some descriptors may be under way, and cannot be recalled

    def state(self, agent_name: str, handle: Any) -> ReadState:
        """Of a read that was under way. Makes it progress. Never raises."""
        try:
            return _STATES[self._agent.check_xfer_state(handle)]
        except nixlRemoteDisconnectError as error:
            logger.warning("read from %s failed: %s", agent_name, error)
            return ReadState.FAILED
        except Exception as error:  # of one descriptor, or NIXL has lost sight of the read; UCX has perhaps not
            return unknown(agent_name, error)

    def release(self, handle: Any) -> None:
        """Of a read that has ended."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            logger.warning("NIXL did not release an ended read: %s", error)

    def close(self) -> None:
        """No read is under way. Idempotent."""
        for registration in self._registrations:
            self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._agent = None


def unknown(agent_name: str, error: Exception) -> ReadState:
    """Says so in the log."""
    extra = {"event": "read_unknown", "peer": agent_name, "reason": repr(error)}
    logger.error("a read failed in part; its blocks are not used again until this engine restarts", extra=extra)
    return ReadState.UNKNOWN


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
