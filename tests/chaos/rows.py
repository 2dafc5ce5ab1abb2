"""The rows of `make chaos`: a fault, what is promised of it, and what a client may see."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.burdens import full_disk, scraped, unread
from tests.chaos.faults import Fault, both, frozen, killed, pointed, rolled, scaled, terminated

# What clients see of their requests when the process that held their connections has gone; and Serve's word for none.
LOST_INGRESS = ("error event ingress_lost", "status 503 ingress_lost")
LOST_PROXY = ("connection cut", "connection refused")
# Of new requests while a pool has nobody; those that have begun wait for who comes next.
NOBODY_THERE = ("status 503 unavailable",)


@dataclass(frozen=True, slots=True)
class Row:
    """may_see: how an error that is allowed begins; none is, if empty. Texts are never wrong, whatever is allowed.

    may_fail: how many of the clients, at most, have one.
    """

    name: str
    fault: Fault | None
    may_see: tuple[str, ...] = ()
    may_fail: float = 1.0


ROWS = {
    row.name: row
    for row in (
        Row("nothing", None),
        Row("kill prefill", killed("prefill")),
        Row("kill decode", killed("decode")),
        Row("kill both prefill", killed("prefill", 2), NOBODY_THERE),
        Row("kill both decode", killed("decode", 2), NOBODY_THERE),
        Row("kill prefill and decode", both(killed("prefill"), killed("decode"))),
        Row("freeze prefill 2 s", frozen("prefill", 2.0)),
        Row("freeze prefill 20 s", frozen("prefill", 20.0)),
        Row("freeze decode 2 s", frozen("decode", 2.0)),
        Row("freeze decode 20 s", frozen("decode", 20.0)),
        Row("freeze both decode 10 s", frozen("decode", 10.0, 2), NOBODY_THERE),
        Row("SIGTERM prefill", terminated("prefill")),
        Row("SIGTERM decode", terminated("decode")),
        Row("roll both pools", rolled("prefill", "decode")),
        Row("decode 2 to 1 to 2", scaled("decode", 1)),
        Row("KV bit flip", pointed("corrupt.received")),
        Row("KV at 2 MB/s for 20 s", pointed("slow.reads", "2e6", 20.0)),
        Row("no room for the log for 10 s", full_disk(10.0)),
        Row("4 clients that read nothing", unread(4, 15.0)),
        Row("/metrics 100 times a second", scraped(100.0, 10.0)),
        Row("kill ingress", killed("ingress"), LOST_INGRESS),
        Row("freeze ingress 5 s", frozen("ingress", 5.0)),
        Row("kill controller", killed("controller")),
        Row("freeze controller 20 s", frozen("controller", 20.0)),
        Row("kill controller and decode", both(killed("controller"), killed("decode"))),
        Row("freeze proxy 5 s", frozen("proxy", 5.0)),
        Row("kill proxy", killed("proxy"), LOST_PROXY),
        Row("freeze raylet 5 s", frozen("raylet", 5.0)),
        Row("freeze GCS 20 s", frozen("gcs", 20.0)),
    )
}
