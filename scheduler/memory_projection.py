"""How many blocks will be in use at every step to come, and the highest of these numbers.

Time is counted in steps. Every running sequence takes one row in each step, so what a request will use is known
as a function of the step's number: it grows by one block per sequence whenever their position enters a new
block, until its last row, and stays until that row's step has been committed. Nothing of it changes as steps go
by; it changes when a request comes, starts, loses a choice, stalls, drafts or goes. One that sits out steps is taken
to grow as if it did not, and to stay for as long as it may. One that drafts has a pace: tokens that a step brings it.

Total use only falls when somebody's blocks are released. So its peak is at one of the last steps before a
release, or beyond all of them, and only there it is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import neg

from scheduler.memory_budget import num_blocks_for

# Last step of what nothing is known about the end of.
NO_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Profile:
    """Blocks of one request: base + live * ((pace * step + offset) // block_size) up to last_row, then no more growth.

    live: sequences that still grow, all at the same position. offset: their position minus the step's number, or that
    times the pace. last_row: the step of their last row. until: the last step at which the blocks are still held.
    is_estimate: there may be rows behind the last one. others: of its sequences that are elsewhere, on top.
    """

    base: int
    live: int
    offset: int
    last_row: int
    until: int
    is_estimate: bool = False
    pace: int = 1
    others: tuple[Profile, ...] = ()

    def use_at(self, step: int, block_size: int) -> int:
        """Blocks in use after the rows of `step`, which must not lie before the profile was made."""
        if step > self.until:
            return 0
        blocks = self.base + self.live * ((self.pace * min(step, self.last_row) + self.offset) // block_size)
        return blocks + sum([other.use_at(step, block_size) for other in self.others]) if self.others else blocks

    def peak(self, block_size: int) -> int:
        blocks = self.own_peak(block_size)
        return blocks + sum([other.peak(block_size) for other in self.others]) if self.others else blocks

    def own_peak(self, block_size: int) -> int:
        """Without the others."""
        return self.base + self.live * ((self.pace * self.last_row + self.offset) // block_size)


def constant(num_blocks: int, until: int = NO_END) -> Profile:
    """Held up to a step, or until further notice."""
    return Profile(num_blocks, 0, 0, 0, until)


def unstarted(prompt_len: int, num_choices: int, num_rows: int, first_step: int, block_size: int) -> Profile:
    """A request that may start at `first_step` or at any later time, and then takes num_rows rows.

    Whenever it starts, it never uses more than this: it grows as if it started at once, and ends as if it never did.
    """
    num_held = num_blocks_for(prompt_len, block_size)
    return growing(num_held, num_choices, num_choices, prompt_len, num_rows, first_step, NO_END, block_size)


def growing(
    num_held: int,
    num_live: int,
    num_sharing: int,
    position: int,
    num_rows: int,
    first_step: int,
    until: int,
    block_size: int,
    pace: int = 1,
    num_spare: int = 0,
) -> Profile:
    """A request that holds num_held blocks and whose num_live sequences go on at `position`, from first_step on.

    num_sharing: sequences that have the block of `position` in common, if it was begun: all but the last one to
    write it copy it first (1: it has been copied already, or there is nobody else). num_rows: until it grows no more.
    num_spare: tokens behind its position that each holds blocks for, too.
    """
    if num_rows == 0:
        return Profile(num_held, 0, 0, first_step - 1, until)
    num_copies = min(num_live, num_sharing - 1) if position % block_size else 0
    offset = position + num_spare - pace * first_step
    base = num_held + num_copies - num_live * ((position - 1) // block_size)
    return Profile(base, num_live, offset, first_step + num_rows - 1, until, pace=pace)


class MemoryProjection:
    """Profiles by request id.

    With m of them, the first question after a change costs O(m log m + m block_size) (the second part is a sum over
    a small list), another one O(log m), and O(m) when a newcomer fits only by what others release. How many
    requests wait for admission matters to none of it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._profiles: dict[str, Profile] = {}
        self._is_stale = False
        self._next_due = NO_END
        # Last steps before a release, ascending, and the total then; behind the last one, the total without end.
        self._ends: list[int] = []
        self._totals: list[int] = [0]
        self._peaks: list[int] = [0]  # highest total from here on

    def __len__(self) -> int:
        return len(self._profiles)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._profiles

    def get(self, request_id: str) -> Profile | None:
        return self._profiles.get(request_id)

    def use_at(self, step: int) -> int:
        """Blocks in use after the rows of `step`, whatever comes later. O(m)."""
        return sum(profile.use_at(step, self._block_size) for profile in self._profiles.values())

    def set(self, request_id: str, profile: Profile) -> None:
        """Add a request, or say anew what it will use. Mutates."""
        self._profiles[request_id] = profile
        self._is_stale = True

    def remove(self, request_id: str) -> None:
        """Its blocks are free. Unknown ids are ignored. Mutates."""
        if self._profiles.pop(request_id, None) is not None:
            self._is_stale = True

    def overdue(self, step: int) -> list[str]:
        """Requests that should have released their blocks before `step`, or were to grow no more by now but for an
        estimate. O(1) when there are none.
        """
        self._refresh()
        if step <= self._next_due:
            return []
        return [request_id for request_id, profile in self._profiles.items() if _due(profile) < step]

    @property
    def next_due(self) -> int:
        """The last step before which `overdue` names nobody, unless something changes."""
        self._refresh()
        return self._next_due

    def peak(self, step: int) -> int:
        """Most blocks in use at any time from `step` on."""
        self._refresh()
        return self._peaks[bisect_left(self._ends, step)]

    def peak_holds_until(self, step: int) -> int:
        """The last step from `step` on of which `peak` says the same, unless something changes."""
        self._refresh()
        index = bisect_left(self._ends, step)
        peak = self._peaks[index]
        while index < len(self._ends) and self._peaks[index + 1] == peak:
            index += 1
        return self._ends[index] if index < len(self._ends) else NO_END

    def falls_to(self, num_blocks: int, step: int) -> int | None:
        """The first step, not before this one, from which on no more blocks than these are in use; None: there is
        none."""
        self._refresh()
        index = bisect_left(self._ends, step)
        # The peaks never rise: each is the highest use from there on.
        index = bisect_left(self._peaks, -num_blocks, lo=index, key=neg)
        if index == len(self._peaks):
            return None
        return max(step, self._ends[index - 1] + 1) if index else step

    def peak_with(self, newcomer: Profile, step: int) -> int:
        """What `peak` would be if the newcomer, who has no end, were there too."""
        self._refresh()
        block_size = self._block_size
        highest = self._totals[-1] + newcomer.peak(block_size)
        for index in range(bisect_left(self._ends, step), len(self._ends)):
            highest = max(highest, self._totals[index] + newcomer.use_at(self._ends[index], block_size))
        return highest

    def fits(self, newcomer: Profile, step: int, limit: int) -> bool:
        """Whether nothing from `step` on would exceed the limit with the newcomer, who has no end."""
        if self.peak(step) + newcomer.peak(self._block_size) <= limit:
            return True
        return self.peak_with(newcomer, step) <= limit

    def _refresh(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        block_size = self._block_size
        self._next_due = min(map(_due, self._profiles.values()), default=NO_END)
        releases = sorted({p.until for p in self._profiles.values() if p.until < NO_END})
        profiles = list(self._profiles.values())
        profiles += [other for profile in profiles if profile.others for other in profile.others]
        by_end = sorted(profiles, key=lambda p: p.until)
        by_last_row = sorted(profiles, key=lambda p: p.last_row)
        # From the last release backwards: who is there, and of those, who still grows.
        held = 0
        growths: dict[int, _Growth] = {}  # by pace
        totals = []
        for end in (NO_END, *reversed(releases)):
            while by_end and by_end[-1].until >= end:
                held += by_end.pop().own_peak(block_size)
            while by_last_row and by_last_row[-1].last_row > end:
                profile = by_last_row.pop()
                held -= profile.own_peak(block_size)
                if (growth := growths.get(profile.pace)) is None:
                    growth = growths[profile.pace] = _Growth(block_size, profile.pace)
                growth.add(profile)
            totals.append(held + sum([growth.at(end) for growth in growths.values()]))
        self._ends = releases
        self._totals = totals[::-1]
        self._peaks = list(self._totals)
        for index in range(len(self._peaks) - 2, -1, -1):
            self._peaks[index] = max(self._peaks[index], self._peaks[index + 1])


def _due(profile: Profile) -> int:
    """The last step for which the profile is right if its request is still there afterwards."""
    return profile.last_row if profile.is_estimate else profile.until


class _Growth:
    """The sum of profiles of one pace that still grow at a step, in O(block_size) instead of one by one."""

    def __init__(self, block_size: int, pace: int) -> None:
        self._block_size, self._pace = block_size, pace
        self._base = self._live = 0
        self._live_of_remainder = [0] * block_size

    def add(self, profile: Profile) -> None:
        quotient, remainder = divmod(profile.offset, self._block_size)
        self._base += profile.base + profile.live * quotient
        self._live += profile.live
        self._live_of_remainder[remainder] += profile.live

    def at(self, step: int) -> int:
        quotient, remainder = divmod(self._pace * step, self._block_size)
        carried = sum(self._live_of_remainder[self._block_size - remainder :]) if remainder else 0
        return self._base + self._live * quotient + carried
