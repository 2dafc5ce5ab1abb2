"""Where this process is reached by others: its host's address, and a free port there."""

from __future__ import annotations

from typing import Any

import zmq


def node_address() -> str:
    """This node's address as Ray knows it. Ray runs."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def bind_free_port(socket: zmq.Socket[Any], host: str) -> str:
    """Bind to a free port of that address of this host, IPv4 or IPv6. Returns the endpoint for those who connect.

    Raises zmq.ZMQError when the address can't be bound.
    """
    if ":" in host:
        socket.ipv6 = True
        host = f"[{host}]"
    return f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"
