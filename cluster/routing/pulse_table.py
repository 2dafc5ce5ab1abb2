"""For how long each replica has said nothing: who is to be asked, who is frozen. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PulseRules:
    """ask_after_s: silence after which a replica is asked. frozen_after_s: after which it counts as frozen.

    interval_s: between two ticks. Of the time since the last tick not more than two of these count: had we ourselves
    not run for a while, all replicas would seem to have been silent.
    """

    frozen_after_s: float
    ask_after_s: float
    interval_s: float

    @staticmethod
    def of(frozen_after_s: float) -> PulseRules:
        """Asked often enough to be known in time, but no more than twice a second."""
        return PulseRules(frozen_after_s, min(1.0, frozen_after_s / 4), min(0.5, frozen_after_s / 8))


@dataclass(frozen=True, slots=True)
class PulseChanges:
    """What a tick brings: replicas to be asked, and those that have become frozen or are well again."""

    ask: tuple[str, ...] = ()
    froze: tuple[str, ...] = ()
    recovered: tuple[str, ...] = ()


@dataclass(slots=True)
class _Silence:
    seconds: float = 0.0
    is_frozen: bool = False


class PulseTable:
    """One for each router and pool."""

    def __init__(self, rules: PulseRules) -> None:
        self._rules = rules
        self._silences: dict[str, _Silence] = {}
        self._last_tick_s: float | None = None

    def heard(self, replica_id: str, stalled_s: float = 0.0) -> None:
        """It said something; stalled_s: how long its engine has stood still by its own account. Mutates."""
        silence = self._silences.get(replica_id)
        if silence is not None:
            silence.seconds = stalled_s

    def suspect(self, replica_id: str) -> None:
        """It could not be reached: as if it were known to be frozen, until it is heard again. Mutates."""
        self._silences[replica_id] = _Silence(self._rules.frozen_after_s, is_frozen=True)

    def tick(self, now_s: float, present: Collection[str]) -> PulseChanges:
        """Take the time into account. present: the pool as it is now. Mutates."""
        last_s = now_s if self._last_tick_s is None else self._last_tick_s
        elapsed_s = min(now_s - last_s, 2 * self._rules.interval_s)
        self._last_tick_s = now_s
        self._silences = {name: self._silences.get(name) or _Silence(-elapsed_s) for name in present}
        ask: list[str] = []
        froze: list[str] = []
        recovered: list[str] = []
        for name, silence in self._silences.items():
            silence.seconds += elapsed_s
            if silence.seconds >= self._rules.ask_after_s:
                ask.append(name)
            is_frozen = silence.seconds >= self._rules.frozen_after_s
            if is_frozen != silence.is_frozen:
                silence.is_frozen = is_frozen
                (froze if is_frozen else recovered).append(name)
        return PulseChanges(tuple(ask), tuple(froze), tuple(recovered))
