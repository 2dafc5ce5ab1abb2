"""How many tokens are drafted in the next step: what pays, by measured times and by what held lately.

A draft costs time, never text: it counts only where it is the token that the row draws there anyway. So all of this may
guess, and be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from scheduler.draft_acceptance import DRAFT_COUNTS, DraftAcceptance, expected_accepted
from scheduler.step_times import StepTimes

_LONG_AGO = -(1 << 30)
_ROW_MEMORY, _ENGINE_MEMORY = 12.0, 256.0  # trials; texts change, and with them what can be found
_SMOOTHING = 0.05
_LEAST_PROBE = 0.01  # of a step without drafts
_MOST_CREDIT_STEPS = 4.0
_RETRY_TOKENS = 8  # between two probes of one row: with a lag the first one's result is not known at once


@dataclass(slots=True)
class SpeculationState:
    """Of one request: what came of its drafts. rests_until: a position in front of which it drafts nothing."""

    acceptance: DraftAcceptance = field(default_factory=lambda: DraftAcceptance(_ROW_MEMORY))
    rests_until: int = _LONG_AGO
    tried_at: int = _LONG_AGO  # the position of its last drafts
    first: float = 0.0  # that its first draft holds
    gains: tuple[float, ...] = ()  # drafts that hold, with DRAFT_COUNTS of them; empty: it has drafted nothing yet


class RowSpeculation(NamedTuple):
    """A row of the next step. position: of its last token, or more. most: drafts that it may have; 0: none."""

    state: SpeculationState
    position: int
    most: int


class DraftChoice(NamedTuple):
    """num_drafts: of each row. step_drafts: the most that a row of the step may have; 0: none has any. resting: rows,
    by index, that rest from now on. probe_s: what is spent to learn, and not because it pays.
    """

    num_drafts: tuple[int, ...]
    step_drafts: int = 0
    resting: tuple[int, ...] = ()
    probe_s: float = 0.0


class _Option(NamedTuple):
    """Drafts of some rows, by index: how many tokens the step brings, and how long it takes."""

    step_drafts: int
    drafting: Sequence[int]
    num_tokens: float
    step_s: float

    @property
    def rate(self) -> float:
        return self.num_tokens / self.step_s


class StepSeconds(Protocol):
    """Seconds of a step of rows, by the drafts that its rows have, at most, and by all its tokens."""

    def __call__(self, num_drafts: int, num_tokens: int, /) -> float: ...


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """max_drafts: of a row in a step. max_rows: steps of more have no drafts (None: any may). is_padded: a step with
    drafts computes as many for every row, there or not, as a graph of a card does; else only those that were found.

    off_below, rest_tokens: a row whose first draft holds more rarely than that, and whose drafts would not pay if all
    rows were like it, drafts nothing for so many tokens. margin: what another number of drafts must bring to be chosen
    instead of the last one. probe_share: of all time, what may be spent to learn whether rows can be drafted again.
    """

    max_drafts: int = 7
    max_rows: int | None = None
    is_padded: bool = False
    off_below: float = 0.3
    rest_tokens: int = 64
    margin: float = 0.02
    probe_share: float = 0.005

    def choose(
        self,
        rows: Sequence[RowSpeculation],
        seconds: StepSeconds,
        prior: Sequence[float],
        last: int = 0,
        credit_s: float = 0.0,
        most_tokens: int | None = None,
    ) -> DraftChoice:
        """Drafts of the next step's rows. Pure; O(rows), where it is not padded O(rows log rows).

        prior: as SpeculationState.gains, of rows without any. last: step_drafts of the step before. credit_s: what a
        probe may cost. most_tokens: of the step.

        What brings most tokens a second, of all rows together. Where that is no drafts at all, and the credit allows
        it, a probe: the fewest drafts, for all rows that do not rest.
        """
        none = DraftChoice((0,) * len(rows))
        if not rows or (self.max_rows is not None and len(rows) > self.max_rows):
            return none
        awake = [
            i for i, row in enumerate(rows) if row.most >= DRAFT_COUNTS[0] and row.position >= row.state.rests_until
        ]
        if not awake:
            return none
        plain_s = seconds(0, len(rows))
        resting = frozenset(self._resting(rows, awake, plain_s, seconds))
        awake = [i for i in awake if i not in resting]
        options = [_Option(0, (), len(rows), plain_s)]
        for place, count in enumerate(DRAFT_COUNTS):
            if count <= self.max_drafts and awake:
                gains = [_gain(rows[i], place, prior) for i in awake]
                option = self._option(count, len(rows), awake, gains, seconds)
                if most_tokens is None or self._num_tokens(len(rows), len(option.drafting), count) <= most_tokens:
                    options.append(option)
        best = max(options, key=lambda option: option.rate * (1.0 + self.margin * (option.step_drafts == last)))
        if best.step_drafts:
            return _choice(rows, best.step_drafts, best.drafting, resting)
        return self._probe(rows, awake, plain_s, seconds, resting, credit_s, most_tokens)

    def _option(
        self, count: int, num_rows: int, awake: Sequence[int], gains: Sequence[float], seconds: StepSeconds
    ) -> _Option:
        """The best that can be made of so many drafts: of all rows that are awake, or of those that find most."""
        if self.is_padded:
            step_s = seconds(count, self._num_tokens(num_rows, len(awake), count))
            return _Option(count, awake, num_rows + sum(gains), step_s)
        best, num_tokens, drafting = None, float(num_rows), []
        for gain, index in sorted(zip(gains, awake, strict=True), key=lambda pair: -pair[0]):
            drafting.append(index)
            num_tokens += gain
            step_s = seconds(count, self._num_tokens(num_rows, len(drafting), count))
            if best is None or num_tokens / step_s > best.rate:
                best = _Option(count, tuple(drafting), num_tokens, step_s)
        assert best is not None, "somebody is awake"
        return best

    def _resting(
        self, rows: Sequence[RowSpeculation], awake: Sequence[int], plain_s: float, seconds: StepSeconds
    ) -> Iterator[int]:
        """Rows, by index, that are off from now on."""
        unlikely = [i for i in awake if rows[i].state.gains and rows[i].state.first < self.off_below]
        if not unlikely:
            return
        needed = [
            seconds(count, len(rows) * (1 + count)) / plain_s - 1.0 if count <= self.max_drafts else math.inf
            for count in DRAFT_COUNTS
        ]
        for index in unlikely:
            if all(gain < least for gain, least in zip(rows[index].state.gains, needed, strict=True)):
                yield index

    def _probe(
        self,
        rows: Sequence[RowSpeculation],
        awake: Sequence[int],
        plain_s: float,
        seconds: StepSeconds,
        resting: frozenset[int],
        credit_s: float,
        most_tokens: int | None,
    ) -> DraftChoice:
        """No drafts, or the fewest, of rows that have not been tried lately: of all of them, or of one."""
        count = DRAFT_COUNTS[0]
        untried = [i for i in awake if rows[i].position >= rows[i].state.tried_at + _RETRY_TOKENS]
        for probed in (untried, untried[:1]):
            num_tokens = self._num_tokens(len(rows), len(probed), count)
            if not probed or (most_tokens is not None and num_tokens > most_tokens):
                continue
            # Never for nothing: what the host does for it is in no measured time.
            cost_s = max(_LEAST_PROBE * plain_s, seconds(count, num_tokens) - plain_s)
            if cost_s <= credit_s:
                return _choice(rows, count, probed, resting, cost_s)
        return _choice(rows, 0, (), resting)

    def _num_tokens(self, num_rows: int, num_drafting: int, count: int) -> int:
        """Of a step in which so many rows draft."""
        return num_rows + count * (num_rows if self.is_padded else num_drafting)


class Speculation:
    """What an engine has learned of its drafts, and what it makes of that. One thread.

    A batcher asks `choose` for each step's rows, and says what came of each by `accepted`; whoever runs the steps says
    by `step_took` how long they took. Until a step without drafts has been timed, none has any.
    """

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy = policy
        self.times = StepTimes()
        # Of rows that have drafted nothing yet: as if half of first drafts held, until it is known better.
        self.acceptance = DraftAcceptance(_ENGINE_MEMORY, 4.0, 8.0, 5.6, 8.0)
        self.num_rested = 0  # times that a row was switched off
        self._last = 0
        self._credit_s = 0.0
        self._part_drafting = 0.0  # of rows in steps, lately
        self._tokens_of_drafting = 1.0  # that such a row brings, lately

    @property
    def tokens_a_row(self) -> float:
        """How many tokens a row of a step brings, on average of late; at least 1."""
        return 1.0 + self._part_drafting * (self._tokens_of_drafting - 1.0)

    def choose(
        self, rows: Sequence[RowSpeculation], num_context_tokens: int, most_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Drafts of each row of the next step. num_context_tokens: that its rows attend to. most_tokens: of the step.
        Mutates: who drafts, and who rests."""
        if not rows:
            return ()
        plain_s = self.times.seconds(0, len(rows), num_context_tokens)
        if plain_s is None:
            return (0,) * len(rows)

        def seconds(num_drafts: int, num_tokens: int, /) -> float:
            found = self.times.seconds(num_drafts, num_tokens, num_context_tokens)
            assert found is not None, "a step without drafts was timed"
            return found

        share = self.policy.probe_share
        self._credit_s = min(self._credit_s + share * plain_s, _MOST_CREDIT_STEPS * plain_s)
        choice = self.policy.choose(rows, seconds, gains_of(self.acceptance), self._last, self._credit_s, most_tokens)
        self._credit_s -= choice.probe_s
        for index in choice.resting:
            rows[index].state.rests_until = rows[index].position + self.policy.rest_tokens
        self.num_rested += len(choice.resting)
        self._last = 0 if choice.probe_s else choice.step_drafts
        num_drafting = 0
        if choice.step_drafts:
            for row, count in zip(rows, choice.num_drafts, strict=True):
                if count:
                    num_drafting += 1
                    row.state.tried_at = row.position
        self._part_drafting += _SMOOTHING * (num_drafting / len(rows) - self._part_drafting)
        return choice.num_drafts

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        """A row that was to have num_planned drafts had num_drafted, of which the first num_accepted held. Mutates.

        That none was found costs nothing where steps are not padded: then it says nothing against drafting.
        """
        self._tokens_of_drafting += _SMOOTHING * (1.0 + num_accepted - self._tokens_of_drafting)
        if not num_drafted and not self.policy.is_padded:
            return
        # Where it costs as much as drafts that are wrong, it is one.
        num_drafted = max(1, num_drafted)
        self.acceptance.learn(num_drafted, num_accepted)
        state.acceptance.learn(num_drafted, num_accepted)
        state.first = state.acceptance.first(self.acceptance)
        state.gains = _gains(state.first, state.acceptance.further(self.acceptance))

    def step_took(self, num_drafts: int, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """A step without prompts. num_drafts: the most that a row of it had; num_tokens: that it computed, all rows and
        what was drafted behind them. Mutates."""
        num_drafts = next((count for count in (0, *DRAFT_COUNTS) if count >= num_drafts), num_drafts)
        self.times.count(num_drafts, num_tokens, num_context_tokens, seconds)


def gains_of(acceptance: DraftAcceptance) -> tuple[float, ...]:
    """Drafts that hold of each of DRAFT_COUNTS, on average."""
    return _gains(acceptance.first(), acceptance.further())


def _gains(first: float, further: float) -> tuple[float, ...]:
    return tuple([expected_accepted(first, further, count) for count in DRAFT_COUNTS])


def _gain(row: RowSpeculation, place: int, prior: Sequence[float]) -> float:
    """What the row gains by DRAFT_COUNTS[place] drafts, or by as many as it may have."""
    while DRAFT_COUNTS[place] > row.most:
        place -= 1
    return (row.state.gains or prior)[place]


def _choice(
    rows: Sequence[RowSpeculation], count: int, drafting: Sequence[int], resting: frozenset[int], probe_s: float = 0.0
) -> DraftChoice:
    num_drafts = [0] * len(rows)
    for index in drafting:
        num_drafts[index] = min(count, rows[index].most)
    return DraftChoice(tuple(num_drafts), count, tuple(sorted(resting)), probe_s)
