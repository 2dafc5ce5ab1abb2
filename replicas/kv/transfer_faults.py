"""Where tests may interfere with KV transfers: corrupt blocks, or hold a phase. Never set in production."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replicas.kv.handoff_actions import Action, CheckDigests, SendNote, StartRead
from replicas.messages import Dispute, TransferNote


class TransferFaults(Protocol):
    """Hooks, called on the thread that turns the driver."""

    def after_read(self, transfer_id: str, local_block_ids: Sequence[int]) -> None:
        """A read is DONE; nobody has looked at the blocks yet. May write them."""

    def after_confirm(self, transfer_id: str, source_block_ids: Sequence[int]) -> None:
        """The source has confirmed; its blocks are about to be released. May write them."""

    def hold(self, point: str) -> bool:
        """True: what comes next at this point waits, and is asked again at every poll. Must not raise.

        Points: send_handoff, send_renew, send_done, send_confirm, send_refuse, send_drop, send_dispute, start_read,
        end_read, check_digests. A read held at its end is not polled, but a transport may have ended it, and have
        told the source so, in the call that started it.
        """


def hold_point(action: Action) -> str:
    """The point at which this action may be held; empty for events, which never are."""
    match action:
        case SendNote(message=Dispute()):
            return "send_dispute"
        case SendNote(message=TransferNote(kind=kind)):
            return f"send_{kind}"
        case SendNote():
            return "send_handoff"
        case StartRead():
            return "start_read"
        case CheckDigests():
            return "check_digests"
        case _:
            return ""
