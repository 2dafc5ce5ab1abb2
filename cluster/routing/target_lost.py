"""Why a Serve call did not reach the replica that its caller named.

Not in `target_router`: Ray copies that module's class with all that the module defines, and a copy of an exception is
not caught by its name.
"""

from __future__ import annotations

from typing import ClassVar


class TargetLost(Exception):
    """Any of the three."""

    what: ClassVar[str]

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.replica_id = replica_id

    def __str__(self) -> str:
        return f"replica {self.replica_id} {self.what}"


class ReplicaGone(TargetLost):
    """The named replica is no longer in the pool: it leaves, or has left. Nothing was sent."""

    what = "is not in its pool"


class ReplicaDied(TargetLost):
    """Ray has said that the process of the named replica has ended. Nothing was sent."""

    what = "has died"


class ReplicaUnreachable(TargetLost):
    """No connection to the named replica, or it broke before the call was taken: the process may be dead or not."""

    what = "cannot be reached"
