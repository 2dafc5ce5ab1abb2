"""A KV transport, opened by its name."""

from __future__ import annotations

import pkgutil
from typing import Protocol

import torch

from replicas.kv.kv_transport import KvTransport
from replicas.kv.transport_table import TRANSPORTS
from replicas.settings import TransferSettings


class TransportOpener(Protocol):
    """Called on the thread that the transport will belong to. May block for seconds; raises what is wrong with it.

    pool: dimension 0 counts the blocks; contiguous, outlives the transport. fingerprint: of the model and its layout.
    """

    def __call__(
        self, pool: torch.Tensor, replica_id: str, epoch: str, fingerprint: str, settings: TransferSettings
    ) -> KvTransport: ...


def transport_opener(name: str) -> TransportOpener:
    """Imports the transport. Raises ValueError for a name that no transport has, ImportError where it can't be used."""
    if name not in TRANSPORTS:
        raise ValueError(f'transfer.backend: no transport is named "{name}"; there are {", ".join(TRANSPORTS)}')
    opener: TransportOpener = pkgutil.resolve_name(TRANSPORTS[name])
    return opener
