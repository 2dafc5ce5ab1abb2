"""What UCX is told: reads by CUDA IPC on every card, loopback on CPUs, and never instead of what a user has set."""

from __future__ import annotations

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


def test_the_log_line_names_what_decides() -> None:
    assert ucx_settings(told("cuda")) == f"UCX_TLS=(default) UCX_NET_DEVICES=(default) {GET}=y"
