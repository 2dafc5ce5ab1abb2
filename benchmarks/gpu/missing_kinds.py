"""What is measured of one server besides its runs: some kinds, one after another, each kept in a record once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gpu.campaign_record import CampaignRecord, Line


@dataclass(frozen=True, slots=True)
class Kind:
    """workload: under which it is kept. about_s: how long it takes. measure: blocks; its line, but for piece and
    workload."""

    workload: str
    about_s: float
    measure: Callable[[], Line]


def measure_missing(
    piece: str, kinds: Sequence[Kind], record: CampaignRecord, is_time_for: Callable[[float], bool]
) -> bool:
    """Whether all is measured now. What is recorded is not measured again. What goes wrong is recorded, and ends it."""
    try:
        for kind in kinds:
            if record.of(piece, kind.workload) is not None:
                continue
            if not is_time_for(kind.about_s):
                return False
            line = kind.measure()
            record.add({"piece": piece, "workload": kind.workload, **line})
            print(f"{piece} {kind.workload}: {line}", flush=True)
    except Exception as error:
        record.add({"piece": piece, "workload": None, "error": f"{type(error).__name__}: {error}"[:1500]})
        print(f"{piece} went wrong: {error}", flush=True)
    return True
