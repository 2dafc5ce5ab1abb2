"""Transports by name: every name of the table opens one, and a name that is not there is refused."""

from __future__ import annotations

import re

import pytest
import torch

from replicas.kv.kv_transport import KvTransport
from replicas.kv.transport_opener import transport_opener
from replicas.kv.transport_table import TRANSPORTS
from replicas.settings import TransferSettings


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_name_opens_a_transport_of_this_pool(name: str) -> None:
    settings = TransferSettings(name, lease_s=1.0, verify_digest=True, net_devices=None, max_bytes_in_flight=1)
    transport = transport_opener(name)(torch.zeros(4, 16), "replica", "epoch", "fingerprint", settings)
    try:
        assert isinstance(transport, KvTransport)
        peer = transport.local_peer()
        assert (peer.replica_id, peer.epoch, peer.fingerprint) == ("replica", "epoch", "fingerprint")
        assert (peer.num_blocks, peer.block_bytes) == (4, 64)
        assert type(peer).from_metadata(peer.to_metadata()) == peer
    finally:
        transport.close()


def test_a_name_that_no_transport_has_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape('transfer.backend: no transport is named "ucx"; there are UCX')):
        transport_opener("ucx")
