"""How many tokens are drafted in the next step: what pays, by measured times and by what held lately.

A draft costs time, never text: it counts only where it is the token that the row draws there anyway. So all of this may
guess, and be wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from scheduler.draft_acceptance import DRAFT_COUNTS, DraftAcceptance

LONG_AGO = -(1 << 30)
_ROW_MEMORY = 12.0  # trials; texts change, and with them what can be found
_LEAST_PROBE = 0.01  # of a step without drafts
_RETRY_TOKENS = 8  # between two probes of one row, at least: with a lag the first one's result is not known at once


@dataclass(slots=True)
class SpeculationState:
    """Of one request: what came of its drafts. rests_until: a position in front of which it is off."""

    acceptance: DraftAcceptance = field(default_factory=lambda: DraftAcceptance(_ROW_MEMORY))
    rests_until: int = LONG_AGO
    tried_at: int = LONG_AGO  # where it had its last drafts
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
    """num_drafts: of each row. step_drafts: the most that a row of the step may have; 0: none has any. resting: rows,
    by index, that rest from now on, each for rest_tokens. probe_s: what is spent to learn, and not because it pays.
    """

    num_drafts: tuple[int, ...]
    step_drafts: int = 0
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
    """What is known before a step. prior: as SpeculationState.gains, of rows without any. last: the most drafts that a
    row of the step before was to have. credit_s: what a probe may cost. most_drafts: of a row; most_tokens: of the
    step, None: any number.
    """

    rows: Sequence[RowSpeculation]
    seconds: StepSeconds
    prior: Sequence[float]
    last: int = 0
    credit_s: float = 0.0
    most_drafts: int = DRAFT_COUNTS[-1]
    most_tokens: int | None = None

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
        return (row.state.gains or self.prior)[place]

    def choice(self, count: int, drafting: Iterable[int], probe_s: float = 0.0) -> DraftChoice:
        num_drafts = [0] * len(self.rows)
        for index in drafting:
            num_drafts[index] = min(count, self.rows[index].most)
        return DraftChoice(tuple(num_drafts), count, probe_s=probe_s)


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """max_drafts: of a row in a step. max_rows: steps of more have no drafts (None: any may). is_padded: a step with
    drafts computes as many for every row, there or not, as a graph of a card does; else only those that were found.

    off_below, rest_tokens: a row whose first draft holds more rarely than that, and whose drafts would not pay if all
    rows were like it, rests for so many tokens, or for fewer where it costs little to try again: it is no reason for
    drafts, though in a padded step that has some for others it has its own, which cost nothing. margin: what
    another number of drafts must bring to be chosen instead of the last one. probe_share: of all time, what may be
    spent to learn whether rows can be drafted again.
    """

    max_drafts: int = 7
    max_rows: int | None = None
    is_padded: bool = False
    off_below: float = 0.3
    rest_tokens: int = 64
    margin: float = 0.02
    probe_share: float = 0.005

    def may_draft(self, num_rows: int) -> bool:
        """Whether steps of so many rows may have drafts."""
        return self.max_rows is None or num_rows <= self.max_rows

    def choose(self, outlook: StepOutlook) -> DraftChoice:
        """Drafts of the next step's rows. Pure; O(rows), where it is not padded O(rows log rows).

        What brings most tokens a second, of all rows together. Where that is no drafts at all, and the credit allows
        it, a probe: the fewest drafts, for all rows that do not rest.
        """
        num_rows = outlook.num_rows
        if not num_rows or not self.may_draft(num_rows):
            return outlook.choice(0, ())
        awake = [
            i
            for i, row in enumerate(outlook.rows)
            if row.most >= DRAFT_COUNTS[0] and row.position >= row.state.rests_until
        ]
        if not awake:
            return outlook.choice(0, ())
        resting = self._resting(outlook, awake)
        awake = [i for i in awake if i not in resting]
        options = [option for option in self._options(outlook, awake) if self._may_be(outlook, option)]
        # No step is faster for its drafts: where it seems so, the other one's time is an old one.
        plain_s = min([outlook.plain_s, *[option.step_s for option in options]])
        options.append(_Option(0, (), num_rows, plain_s))
        best = max(options, key=lambda option: option.rate * (1.0 + self.margin * (option.step_drafts == outlook.last)))
        # Drafts of rows that rest are computed anyway, and bring news of them.
        drafting = range(num_rows) if self.is_padded else best.drafting
        choice = outlook.choice(best.step_drafts, drafting) if best.step_drafts else self._probe(outlook, awake)
        if not resting:
            return choice
        return choice._replace(resting=tuple(sorted(resting)), rest_tokens=self._rest_tokens(outlook))

    def _options(self, outlook: StepOutlook, awake: Sequence[int]) -> Iterator[_Option]:
        """The best that can be made of each number of drafts: of all rows awake, or of those that gain the most."""
        for place, count in enumerate(DRAFT_COUNTS):
            if count > min(self.max_drafts, outlook.most_drafts) or not awake:
                return
            gains = [outlook.gain(index, place) for index in awake]
            if self.is_padded:
                step_s = outlook.seconds(count, self._num_tokens(outlook, len(awake), count))
                yield _Option(count, awake, outlook.num_rows + sum(gains), step_s)
                continue
            found: list[_Option] = []
            num_tokens = float(outlook.num_rows)
            in_order = sorted(zip(gains, awake, strict=True), key=lambda pair: -pair[0])
            drafting = [index for _, index in in_order]
            for number, (gain, _) in enumerate(in_order, 1):
                num_tokens += gain
                step_s = outlook.seconds(count, self._num_tokens(outlook, number, count))
                found.append(_Option(count, drafting, num_tokens, step_s))
            rates = [option.rate for option in found]
            number = rates.index(max(rates)) + 1
            yield found[number - 1]._replace(drafting=drafting[:number])

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
        """As long as a probe takes to be paid by its share of time, between the shortest and the longest rest."""
        paid_after = self._needed(outlook, DRAFT_COUNTS[0]) / self.probe_share
        return round(min(max(_RETRY_TOKENS, paid_after), self.rest_tokens))

    def _probe(self, outlook: StepOutlook, awake: Sequence[int]) -> DraftChoice:
        """No drafts, or the fewest, of rows that have not been tried lately: of all of them, or of one."""
        count, plain_s = DRAFT_COUNTS[0], outlook.plain_s
        states = [(i, outlook.rows[i].position - outlook.rows[i].state.tried_at) for i in awake]
        untried = [i for i, num_tokens in states if num_tokens >= _RETRY_TOKENS]
        for probed in (untried, untried[:1]):
            step_s = outlook.seconds(count, self._num_tokens(outlook, len(probed), count))
            # Never for nothing: what the host does for it is in no measured time.
            cost_s = max(_LEAST_PROBE * plain_s, step_s - plain_s)
            option = _Option(count, probed, outlook.num_rows, step_s)
            if probed and cost_s <= outlook.credit_s and self._may_be(outlook, option):
                return outlook.choice(count, probed, cost_s)
        return outlook.choice(0, ())

    def _may_be(self, outlook: StepOutlook, option: _Option) -> bool:
        num_tokens = self._num_tokens(outlook, len(option.drafting), option.step_drafts)
        return outlook.most_tokens is None or num_tokens <= outlook.most_tokens

    def _num_tokens(self, outlook: StepOutlook, num_drafting: int, count: int) -> int:
        """Of a step in which so many rows draft."""
        return outlook.num_rows + count * (outlook.num_rows if self.is_padded else num_drafting)
