"""How many tokens are drafted in the next step: what pays, by measured times and by what held lately.

A draft costs time, never text: it counts only where it is the token that the row draws there anyway. So all of this may
guess, and be wrong.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from scheduler.draft_acceptance import DRAFT_COUNTS, DraftAcceptance

LONG_AGO = -(1 << 30)
_ROW_MEMORY = 24.0  # trials; texts change, and with them what can be found
_LEAST_PROBE = 0.01  # of a step without drafts
_PLAIN_SHARE = 0.25  # of what may be spent to learn: to time steps without drafts anew
_LEAST_PLAIN_AGE = 16  # steps between two such
_RETRY_TOKENS = 8  # between two probes of one row, at least: with a lag the first one's result is not known at once


@dataclass(slots=True)
class SpeculationState:
    """Of one request: what came of its drafts. rests_until: a position in front of which it is off. is_forced: its
    drafts are what a grammar forces, which says nothing of other requests' drafts, nor theirs of it."""

    acceptance: DraftAcceptance = field(default_factory=lambda: DraftAcceptance(_ROW_MEMORY))
    rests_until: int = LONG_AGO
    tried_at: int = LONG_AGO  # where it had its last drafts
    is_forced: bool = False
    num_drafted: int = 0
    num_accepted: int = 0
    first: float = 0.0  # that its first draft holds
    gains: tuple[float, ...] = ()  # drafts that hold, with DRAFT_COUNTS of them; empty: it has drafted nothing yet


class RowSpeculation(NamedTuple):
    """A row of the next step. position: of its last token, or more. most: drafts that it may have; 0: none."""

    state: SpeculationState
    position: int
    most: int


class DraftChoice(NamedTuple):
    """num_drafts: of each row. step_drafts: the most that a row of the step may have; 0: none has any. paying: of those
    that are there because they pay, likewise. resting: rows, by index, that rest from now on, each for rest_tokens.
    probe_s: what is spent to learn, and not because it pays.
    """

    num_drafts: tuple[int, ...]
    step_drafts: int = 0
    paying: int = 0
    resting: tuple[int, ...] = ()
    rest_tokens: int = 0
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
class StepOutlook:
    """What is known before a step. prior: as SpeculationState.gains, of rows without any; forced_prior: likewise, of
    those with grammars. last: the most drafts that a row of the step before was to have. credit_s: what a probe may
    cost. most_drafts: of a row; most_tokens: of the step, None: any number. plain_age: steps since one without drafts.
    """

    rows: Sequence[RowSpeculation]
    seconds: StepSeconds
    prior: Sequence[float]
    last: int = 0
    credit_s: float = 0.0
    most_drafts: int = DRAFT_COUNTS[-1]
    most_tokens: int | None = None
    forced_prior: Sequence[float] = ()
    plain_age: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def plain_s(self) -> float:
        """Without drafts."""
        return self.seconds(0, len(self.rows))

    def gain(self, index: int, place: int) -> float:
        """What a row gains by DRAFT_COUNTS[place] drafts, or by as many as it may have."""
        row = self.rows[index]
        while DRAFT_COUNTS[place] > row.most:
            place -= 1
        prior = self.forced_prior if row.state.is_forced else self.prior
        return (row.state.gains or prior)[place]

    def choice(self, option: _Option, probed: Iterable[int] = (), probe_s: float = 0.0) -> DraftChoice:
        """What an option comes to, and the fewest drafts for those that are probed."""
        num_drafts = [0] * len(self.rows)
        for index in option.drafting:
            num_drafts[index] = min(option.step_drafts, self.rows[index].most)
        for index in probed:
            num_drafts[index] = DRAFT_COUNTS[0]
        step_drafts = max(option.step_drafts, DRAFT_COUNTS[0] if probe_s else 0)
        return DraftChoice(tuple(num_drafts), step_drafts, option.step_drafts, probe_s=probe_s)


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """max_drafts: of a row in a step. max_rows, max_tokens: steps of more have no drafts (None: any may). is_padded:
    drafts that were not found are computed all the same, as places of a graph are; else nothing is.

    off_below, rest_tokens: a row whose first draft holds more rarely than that, and whose drafts would not pay if all
    rows were like it, drafts nothing for so many tokens, or for fewer where it costs little to try again. margin: what
    another number of drafts must bring to be chosen instead of the last one. probe_share: of all time, what may be
    spent to learn whether rows can be drafted again.
    """

    max_drafts: int = 7
    max_rows: int | None = None
    is_padded: bool = False
    max_tokens: int | None = None
    off_below: float = 0.3
    rest_tokens: int = 64
    margin: float = 0.02
    probe_share: float = 0.005

    def may_draft(self, num_rows: int) -> bool:
        """Whether steps of so many rows may have drafts."""
        return self.max_rows is None or num_rows <= self.max_rows

    def choose(self, outlook: StepOutlook) -> DraftChoice:
        """Drafts of the next step's rows. Pure; O(rows log rows).

        What brings most tokens a second, of all rows together; and where the credit allows it, a probe: the fewest
        drafts for rows that do not rest, and for which they do not pay as far as is known.
        """
        num_rows = outlook.num_rows
        if not num_rows or not self.may_draft(num_rows):
            return DraftChoice((0,) * num_rows)
        awake = [
            i
            for i, row in enumerate(outlook.rows)
            if row.most >= DRAFT_COUNTS[0] and row.position >= row.state.rests_until
        ]
        if not awake:
            return DraftChoice((0,) * num_rows)
        resting = self._resting(outlook, awake)
        awake = [i for i in awake if i not in resting]
        options = [option for option in self._options(outlook, awake) if self._may_be(outlook, option)]
        # No step is faster for its drafts: where it seems so, the other one's time is an old one.
        plain_s = min([outlook.plain_s, *[option.step_s for option in options]])
        plain = _Option(0, (), num_rows, plain_s)
        options.append(plain)
        best = max(options, key=lambda option: option.rate * self._favour(outlook, option, plain))
        if self._is_plain_due(outlook, 1.0 - plain.rate / best.rate):
            choice = DraftChoice((0,) * num_rows, paying=best.step_drafts)
        else:
            choice = self._with_probe(outlook, awake, best)
        if not resting:
            return choice
        return choice._replace(resting=tuple(sorted(resting)), rest_tokens=self._rest_tokens(outlook))

    def _favour(self, outlook: StepOutlook, option: _Option, plain: _Option) -> float:
        """Of what the last step had, unless none at all is known to be better: then it is only dear."""
        is_last = option.step_drafts == outlook.last and option.rate >= plain.rate
        return 1.0 + self.margin * is_last

    def _is_plain_due(self, outlook: StepOutlook, lost: float) -> bool:
        """Whether a step without drafts is taken where they pay, to time it anew: the sooner, the less is lost by it.
        By its time it is known what pays, and it is an old one. lost: part of the step's tokens."""
        due_after = max(_LEAST_PLAIN_AGE, lost / (_PLAIN_SHARE * self.probe_share)) if lost > 0.0 else math.inf
        return outlook.plain_age > due_after

    def _options(self, outlook: StepOutlook, awake: Sequence[int]) -> Iterator[_Option]:
        """Each number of drafts for some numbers of rows, those that gain the most."""
        for place, count in enumerate(DRAFT_COUNTS):
            if count > min(self.max_drafts, outlook.most_drafts) or not awake:
                return
            in_order = sorted([(outlook.gain(index, place), index) for index in awake], key=lambda pair: -pair[0])
            drafting = [index for _, index in in_order]
            gained = list(accumulate([gain for gain, _ in in_order]))
            for number in _numbers_up_to(len(awake)):
                step_s = outlook.seconds(count, self._num_tokens(outlook, number, count))
                yield _Option(count, drafting[:number], outlook.num_rows + gained[number - 1], step_s)

    def _resting(self, outlook: StepOutlook, awake: Sequence[int]) -> frozenset[int]:
        """Rows, by index, that are off from now on."""
        states = [(i, outlook.rows[i].state) for i in awake]
        unlikely = [(i, state) for i, state in states if state.gains and state.first < self.off_below]
        if not unlikely:
            return frozenset()
        needed = [self._needed(outlook, count) for count in DRAFT_COUNTS if count <= self.max_drafts]
        # What a row may gain beyond max_drafts does not matter.
        return frozenset(i for i, state in unlikely if all(map(operator.lt, state.gains[: len(needed)], needed)))

    def _needed(self, outlook: StepOutlook, count: int) -> float:
        """How many of so many drafts must hold to pay, if all rows have them: steps that they cost."""
        return outlook.seconds(count, outlook.num_rows * (1 + count)) / outlook.plain_s - 1.0

    def _rest_tokens(self, outlook: StepOutlook) -> int:
        """As long as the probe of one row takes to be paid by its share of time, between the shortest and the longest
        rest."""
        probe_s = outlook.seconds(DRAFT_COUNTS[0], self._num_tokens(outlook, 1, DRAFT_COUNTS[0]))
        paid_after = (probe_s / outlook.plain_s - 1.0) / self.probe_share
        return round(min(max(_RETRY_TOKENS, paid_after), self.rest_tokens))

    def _with_probe(self, outlook: StepOutlook, awake: Sequence[int], best: _Option) -> DraftChoice:
        """What pays, and beside it the fewest drafts for others that were not tried lately: for all of them, or for the
        one that was tried longest ago."""
        left = set(awake).difference(best.drafting)
        ages = [(_tokens_since(outlook.rows[i]), i) for i in left]
        untried = [i for age, i in sorted(ages, reverse=True) if age >= _RETRY_TOKENS]
        for probed in (untried, untried[:1]):
            count = max(best.step_drafts, DRAFT_COUNTS[0])
            num_tokens = self._num_tokens(outlook, len(best.drafting), best.step_drafts) + DRAFT_COUNTS[0] * len(probed)
            # Never for nothing: what the host does for it is in no measured time.
            cost_s = max(_LEAST_PROBE * best.step_s, outlook.seconds(count, num_tokens) - best.step_s)
            if probed and cost_s <= outlook.credit_s and self._has_room(outlook, num_tokens):
                return outlook.choice(best, probed, cost_s)
        return outlook.choice(best)

    def _may_be(self, outlook: StepOutlook, option: _Option) -> bool:
        return self._has_room(outlook, self._num_tokens(outlook, len(option.drafting), option.step_drafts))

    def _has_room(self, outlook: StepOutlook, num_tokens: int) -> bool:
        return all(most is None or num_tokens <= most for most in (outlook.most_tokens, self.max_tokens))

    def _num_tokens(self, outlook: StepOutlook, num_drafting: int, count: int) -> int:
        """Of a step in which so many rows draft."""
        return outlook.num_rows + count * num_drafting


def _tokens_since(row: RowSpeculation) -> int:
    """Since it had its last drafts."""
    return row.position - row.state.tried_at


def _numbers_up_to(most: int) -> Iterator[int]:
    """Each up to 4, then by thirds, and the last: between them times differ by little."""
    number = 1
    while number < most:
        yield number
        number += max(1, number // 3)
    yield most
