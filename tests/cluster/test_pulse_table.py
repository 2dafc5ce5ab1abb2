"""Who is asked, who is frozen and who is well again, by the time that each has been silent."""

from __future__ import annotations

from cluster.routing.pulse_table import PulseChanges, PulseRules, PulseTable

RULES = PulseRules(frozen_after_s=5.0, ask_after_s=1.0, interval_s=0.5)


class Clock:
    """Ticks a table every interval, and keeps what changed and when."""

    def __init__(self) -> None:
        self.table, self.now_s = PulseTable(RULES), 100.0
        self.table.tick(self.now_s, ("a", "b"))

    def tick(self, after_s: float = 0.5) -> PulseChanges:
        self.now_s += after_s
        return self.table.tick(self.now_s, ("a", "b"))


def test_silence_is_asked_about_and_then_it_is_frozen_within_a_tick() -> None:
    clock = Clock()
    asked_s, froze_s = [], []
    for _ in range(20):
        clock.table.heard("b")
        changes = clock.tick()
        asked_s += [clock.now_s - 100.0] * ("a" in changes.ask)
        froze_s += [clock.now_s - 100.0] * ("a" in changes.froze)
        assert "b" not in changes.ask + changes.froze + changes.recovered
    assert asked_s[0] == 1.0
    assert froze_s == [5.0]


def test_an_answer_brings_it_back_once_unless_its_engine_stands_still() -> None:
    clock = Clock()
    for _ in range(12):
        clock.tick()
    clock.table.heard("a", stalled_s=6.0)
    assert clock.tick().recovered == ()
    clock.table.heard("a", stalled_s=0.4)
    assert clock.tick().recovered == ("a",)
    assert clock.tick().recovered == ()


def test_an_engine_that_stands_still_is_frozen_though_its_process_answers() -> None:
    clock = Clock()
    froze = []
    for step in range(14):
        clock.table.heard("a", stalled_s=step / 2)
        froze += [step / 2 + 0.5] * ("a" in clock.tick().froze)
    assert froze == [5.0]


def test_time_in_which_we_ourselves_stood_still_is_nobodys_silence() -> None:
    """The ingress was stopped for a minute, or its event loop was busy."""
    clock = Clock()
    clock.table.heard("a")
    assert clock.tick(60.0).froze == ()
    clock.table.heard("a")
    clock.table.heard("b")
    assert clock.tick() == PulseChanges()


def test_who_could_not_be_reached_is_asked_at_once_and_recovers_by_its_answer() -> None:
    clock = Clock()
    clock.table.suspect("a")
    changes = clock.tick()
    assert (changes.ask, changes.froze) == (("a",), ())
    clock.table.heard("a")
    assert clock.tick().recovered == ("a",)


def test_who_left_is_forgotten_and_who_joins_begins_anew() -> None:
    table = PulseTable(RULES)
    for tick in range(12):
        table.tick(tick * 0.5, ("a",))
    assert table.tick(6.0, ()) == PulseChanges()
    assert table.tick(6.5, ("a", "new")) == PulseChanges()
    assert table.tick(7.5, ("a", "new")).ask == ("a", "new")


def test_any_bound_is_kept() -> None:
    """Whatever the bound, a replica is asked several times before it is reached."""
    for bound_s in (1.0, 2.0, 5.0, 60.0):
        rules = PulseRules.of(bound_s)
        assert rules.ask_after_s + 2 * rules.interval_s <= bound_s / 2 + 0.1
        assert rules.interval_s <= 0.5
