"""The KV transports by name, which is what `transfer.backend` in the config says.

Names of functions (`transport_opener.TransportOpener`) rather than themselves: configs are read where there is neither
torch nor NIXL.
"""

from __future__ import annotations

from collections.abc import Mapping

TRANSPORTS: Mapping[str, str] = {
    "UCX": "replicas.kv.nixl_transport:open_ucx",
}
