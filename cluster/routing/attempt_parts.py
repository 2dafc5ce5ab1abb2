"""What attempts work with: the same for all of one router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.routing.mailboxes import Mailboxes
from cluster.routing.pool_view import PoolView
from cluster.routing.router_limits import AttemptLimits
from cluster.routing.watched_pool import WatchedPool
from replicas.messages import ChannelAddress


@dataclass(frozen=True, slots=True)
class AttemptParts:
    """pool_of: that a replica is in. channel: where tokens come to."""

    pool_of: Callable[[str], WatchedPool]
    view: PoolView
    mailboxes: Mailboxes
    channel: ChannelAddress
    limits: AttemptLimits
