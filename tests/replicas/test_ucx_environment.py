"""What UCX is told: reads by CUDA IPC on every card, loopback on CPUs, and never instead of what a user has set."""

from __future__ import annotations

import subprocess
import sys

import pytest

from replicas.kv.ucx_environment import set_ucx_defaults, ucx_settings

GET = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


def told(device_type: str, net_devices: str | None = None, **own: str) -> dict[str, str]:
    environment = {**own}
    set_ucx_defaults(environment, device_type, net_devices)
    return environment


def test_a_card_s_pool_is_read_by_cuda_ipc_with_or_without_nvlink() -> None:
    assert told("cuda") == {GET: "y"}
    assert told("cuda", "mlx5_0:1") == {GET: "y", "UCX_NET_DEVICES": "mlx5_0:1"}


def test_a_cpu_s_pool_stays_on_loopback() -> None:
    assert told("cpu") == {"UCX_NET_DEVICES": "lo", "UCX_TLS": "sm,tcp,self"}
    assert told("cpu", "eth0") == {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "sm,tcp,self"}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_user_s_own_values_win(device_type: str) -> None:
    own = {GET: "n", "UCX_NET_DEVICES": "ib0", "UCX_TLS": "rc"}
    assert told(device_type, "eth0", **own) == own


@pytest.mark.slow
def test_ucx_is_loaded_by_the_agent_and_not_before() -> None:
    """It reads its variables then: what is set before an agent is made is in time."""
    program = (
        "import os, torch\n"
        "from pathlib import Path\n"
        "from replicas.kv.nixl_transport import NixlTransport\n"
        "loaded = lambda: 'libucp' in Path('/proc/self/maps').read_text()\n"
        "before = loaded()\n"
        "NixlTransport(torch.zeros(4, 16), 'replica', 'epoch', 'fingerprint')\n"
        "print(before, loaded(), flush=True)\n"
        "os._exit(0)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False True"


def test_the_log_line_names_what_decides() -> None:
    assert ucx_settings(told("cuda")) == f"UCX_TLS=(default) UCX_NET_DEVICES=(default) {GET}=y"
