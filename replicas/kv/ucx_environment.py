"""What UCX is told by environment variables, which is its only way to be told. A user's own values win."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_SAID = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY")


def set_ucx_defaults(environment: MutableMapping[str, str], device_type: str, net_devices: str | None) -> None:
    """For a pool on this device. Before a NIXL agent is made: UCX reads them then. Mutates.

    net_devices: the interfaces that UCX may use. None: a CPU pool stays on loopback, with a GPU's UCX chooses.
    """
    on_cpu = device_type == "cpu"
    if on_cpu or net_devices is not None:
        environment.setdefault("UCX_NET_DEVICES", net_devices or "lo")
    if on_cpu:
        environment.setdefault("UCX_TLS", "sm,tcp,self")
    else:
        # By itself it reads by CUDA IPC only on cards with NVLink, and over TCP on all others and within one card:
        # measured there 0.5 GiB/s instead of 560 (UCX 1.23, uct_cuda_ipc_iface_get_max_get_zcopy).
        environment.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")


def ucx_settings(environment: Mapping[str, str]) -> str:
    """The variables that decide what moves KV, for a log line."""
    return " ".join(f"{name}={environment.get(name, '(default)')}" for name in _SAID)
