"""A NIXL agent and the memory it has registered, as the opaque address of a `TransferPeer`. No torch, no NIXL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


class NotAnAddress(ValueError):
    """These bytes are not what `NixlAddress.encode` makes. The text says which field."""


@dataclass(frozen=True, slots=True)
class NixlAddress:
    """agent_metadata: how to connect and what is registered, as NIXL wrote it. base_address: of the pool, contiguous,
    on device_id. near: as `near_pools.NearAddress`; connection: how to connect alone, for who reads so. Empty: nobody
    can.
    """

    agent_metadata: bytes
    base_address: int
    device_id: int
    mem_type: Literal["DRAM", "VRAM"]
    near: bytes = b""
    connection: bytes = b""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(address: bytes) -> NixlAddress:
        """Raises NotAnAddress, and nothing else."""
        try:
            return msgspec.msgpack.decode(address, type=NixlAddress)
        except (msgspec.MsgspecError, ValueError) as error:
            raise NotAnAddress(str(error)) from None
