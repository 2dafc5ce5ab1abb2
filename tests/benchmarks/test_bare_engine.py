"""What stands for the token channel in a bare engine is called as the real one is."""

from __future__ import annotations

import inspect

import pytest

from benchmarks.gpu.bare_engine import RecordingSender
from replicas.channels.token_sender import TokenSender


def parameters(method: object) -> list[str]:
    assert callable(method)
    return list(inspect.signature(method).parameters)


@pytest.mark.parametrize("name", ["send", "flush", "close", "stalled_routers"])
def test_the_stand_in_is_called_as_the_sender(name: str) -> None:
    assert parameters(getattr(RecordingSender, name)) == parameters(getattr(TokenSender, name))
