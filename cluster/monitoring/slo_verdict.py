"""Whether one request met its service level objectives. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.slo import SloConfig

# As in splitserve_requests_total: ends that are the server's fault.
_FAILURES = frozenset({"server_error", "rejected", "timeout"})


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What was measured of a request that has ended, in seconds.

    tpot_s: of its slowest choice. comes_whole: there was nothing to see before its end (beam search, an echo), so that
    a time to its first token means nothing. None: it did not get that far.
    """

    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    comes_whole: bool = False


def judge(times: RequestTimes, outcome: str, slo: SloConfig) -> dict[str, bool]:
    """Objective -> whether it was met; an objective that this request says nothing about is left out.

    "any" sums them up: missed by whoever missed one, and by whoever failed. A client that leaves is only counted where
    it had waited too long already; one whose request was wrong is not counted at all. outcome: as in
    splitserve_requests_total.
    """
    if outcome == "client_error":
        return {}
    met: dict[str, bool] = {}
    if times.ttft_s is not None:
        met["ttft"] = times.ttft_s <= slo.ttft_s
    elif times.e2e_s > slo.ttft_s and not times.comes_whole:
        met["ttft"] = False
    if times.tpot_s is not None:
        met["tpot"] = times.tpot_s <= slo.tpot_s
    if slo.e2e_s is not None and (outcome == "ok" or times.e2e_s > slo.e2e_s):
        met["e2e"] = times.e2e_s <= slo.e2e_s
    has_missed = not all(met.values()) or outcome in _FAILURES
    if has_missed or outcome == "ok":
        met["any"] = not has_missed
    return met
