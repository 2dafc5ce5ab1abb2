"""Engines move KV by whatever transport their settings name, and the texts are the same."""

from __future__ import annotations

import pytest

from replicas.kv.transport_opener import TransportOpener
from replicas.serving import engine_builder
from replicas.settings import TransferSettings
from tests.engines.local_system import LocalSystem
from tests.engines.local_transport import LocalHub
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings


def test_a_pair_hands_over_by_the_transport_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tiny_goldens: TinyGoldens
) -> None:
    hub = LocalHub()
    opened: list[str] = []

    def opener(name: str) -> TransportOpener:
        opened.append(name)
        return hub.open

    monkeypatch.setattr(engine_builder, "transport_opener", opener)
    transfer = TransferSettings(
        "local", lease_s=60.0, verify_digest=True, net_devices=None, max_bytes_in_flight=1 << 29
    )
    decode, prefill = (tiny_settings(pool, tiny_goldens.folder, transfer=transfer) for pool in ("decode", "prefill"))
    system = LocalSystem(decode, prefill)
    goldens = [tiny_goldens.of(40, number) for number in range(2)]
    try:
        results = system.run([system.generation(golden.prompt_ids, 32) for golden in goldens])
        transport = hub.agents[system.decode.peer.agent_name]
    finally:
        system.close()
    assert [result.token_ids[0] for result in results] == [golden.output_ids[:32] for golden in goldens]
    assert opened == ["local", "local"]
    assert transport.num_reads == 2
    assert hub.agents == {}, "closed with their engines"
