"""How long steps of rows take, by how many tokens they compute: learned from those that ran."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

_SMOOTHING = 0.1  # of a size's mean
# Of a size's first times a short one counts, as the first ones compile, load, warm up; but not the shortest: where a
# step is told late, the next one seems short by as much.
_NUM_SETTLING = 4
_MOST_OFF = 1.25  # a step counts as at most so many times the mean, at least a part: it was interrupted, or is not
_EXACT_SIZES = 16  # sizes up to this are told apart one by one, larger ones in eighths of a doubling
_MOST_AGE = 1024  # steps after which a time with drafts is no longer believed: nothing else would bring it down again
_FORGETTING = 128  # steps between looking for such times
_GROWTH = 0.2  # where nothing is measured, a step of twice as many tokens takes 2 ** _GROWTH times as long
_SLOPE_MEMORY = 1.0 / 256
# Steps of a size until its mean is near: while it comes there, it moves with the context without being moved by it.
_NUM_NEAR = 48


@dataclass(slots=True)
class _Size:
    """Steps of about as many tokens. mean_tokens, mean_context: what they had on average. first_s: the first times."""

    mean_s: float
    mean_tokens: float
    mean_context: float
    num_steps: int
    last_step: int
    first_s: list[float]

    def settle(self, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """One of its first steps, but not the very first. Mutates."""
        self.first_s.append(seconds)
        self.mean_s = sorted(self.first_s)[1 if len(self.first_s) > 2 else 0]
        self.mean_tokens, self.mean_context = num_tokens, num_context_tokens


class StepTimes:
    """Seconds of a step by the most drafts that a row of it has, its tokens and the positions that it attends to.

    Two curves would not do: 8 rows, and one row with 7 drafts, are both 8 tokens, but the one reads eight contexts, and
    the other one may run a draft model first. What was not measured follows from what was: between two sizes on a line,
    beyond them as steps of any kind grow. One thread.
    """

    def __init__(self) -> None:
        self._curves: dict[int, dict[int, _Size]] = {}
        self._keys: dict[int, list[int]] = {}  # of each curve, ascending
        self._outline: dict[int, float] = {}  # the last mean of a size, of any curve
        self._all_keys: list[int] = []
        self._num_steps = 0
        self._covariance = self._variance = 0.0  # of seconds and context, of context; within sizes, tokens the same

    def count(self, num_drafts: int, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """A step without prompts took so long. num_tokens: of its rows and their drafts. Mutates."""
        if seconds <= 0.0 or num_tokens <= 0:
            return
        self._num_steps += 1
        key = _key(num_tokens)
        size = self._count(num_drafts, key, num_tokens, num_context_tokens, seconds)
        if key not in self._outline:
            insort(self._all_keys, key)
        self._outline[key] = size.mean_s
        if self._num_steps % _FORGETTING == 0:
            self._forget()

    def _count(self, num_drafts: int, key: int, num_tokens: int, num_context_tokens: int, seconds: float) -> _Size:
        curve = self._curves.setdefault(num_drafts, {})
        size = curve.get(key)
        if size is None:
            insort(self._keys.setdefault(num_drafts, []), key)
            curve[key] = size = _Size(seconds, num_tokens, num_context_tokens, 1, self._num_steps, [seconds])
            return size
        size.num_steps += 1
        size.last_step = self._num_steps
        if size.num_steps <= _NUM_SETTLING:
            size.settle(num_tokens, num_context_tokens, seconds)
            return size
        expected_s = self._at(size, num_context_tokens)
        seconds = min(max(seconds, expected_s / _MOST_OFF), expected_s * _MOST_OFF)
        off_s, off_context = seconds - size.mean_s, num_context_tokens - size.mean_context
        if size.num_steps > _NUM_NEAR and abs(num_tokens - size.mean_tokens) < 1.0:
            self._covariance += off_s * off_context - _SLOPE_MEMORY * self._covariance
            self._variance += off_context * off_context - _SLOPE_MEMORY * self._variance
        size.mean_s += _SMOOTHING * off_s
        size.mean_context += _SMOOTHING * off_context
        size.mean_tokens += _SMOOTHING * (num_tokens - size.mean_tokens)
        return size

    def seconds(self, num_drafts: int, num_tokens: int, num_context_tokens: int) -> float | None:
        """What such a step takes; None: nothing is known about steps without drafts. O(log sizes)."""
        plain_s = self._on_curve(0, num_tokens, num_context_tokens)
        if plain_s is None or not num_drafts:
            return plain_s
        with_drafts_s = self._on_curve(num_drafts, num_tokens, num_context_tokens)
        return self._untried_s(num_drafts, num_tokens, plain_s) if with_drafts_s is None else with_drafts_s

    def _untried_s(self, num_drafts: int, num_tokens: int, plain_s: float) -> float:
        """Of a number of drafts that was never timed: rather too short, so that it is tried. What makes drafts is in
        the times of fewer, and is no reason to take it that more tokens cost as much again.
        """
        for fewer in sorted((kind for kind in self._curves if 0 < kind < num_drafts), reverse=True):
            keys = [key for key in self._keys[fewer] if key <= num_tokens]
            if keys:
                nearest = self._curves[fewer][keys[-1]]
                growth = math.pow(num_tokens / nearest.mean_tokens, _GROWTH)
                return min(plain_s, nearest.mean_s * growth)
        return plain_s

    def has(self, num_drafts: int) -> bool:
        """Whether steps with so many drafts were timed."""
        return bool(self._curves.get(num_drafts))

    def age(self, num_tokens: int) -> int:
        """How many steps ago one without drafts, and of about so many tokens, was timed; of the nearest sizes."""
        sizes = [size for size in self._neighbours(0, num_tokens) if size is not None]
        return self._num_steps - max((size.last_step for size in sizes), default=0)

    def _on_curve(self, num_drafts: int, num_tokens: int, num_context_tokens: int) -> float | None:
        below, above = self._neighbours(num_drafts, num_tokens)
        if below is None and above is None:
            return None
        if below is not None and above is not None:
            below_s, above_s = self._at(below, num_context_tokens), self._at(above, num_context_tokens)
            width = above.mean_tokens - below.mean_tokens
            part = min(1.0, max(0.0, (num_tokens - below.mean_tokens) / width)) if width > 0.0 else 0.0
            return below_s + part * (above_s - below_s)
        end = above if below is None else below
        assert end is not None, "one of them is there"
        here_s, there_s = self._outline_s(num_tokens), self._outline_s(end.mean_tokens)
        growth = 1.0 if here_s is None or there_s is None else here_s / there_s
        return self._at(end, num_context_tokens) * growth

    def _outline_s(self, num_tokens: float, without: int | None = None) -> float | None:
        """Of steps of any kind, with any context: what tells how times grow. without: as if this size were not."""
        keys = self._all_keys if without is None else [key for key in self._all_keys if key != without]
        if not keys:
            return None
        index = bisect_left(keys, num_tokens)
        if index == 0:
            return self._outline[keys[0]]  # weights are read for fewer tokens all the same
        low_s = self._outline[keys[index - 1]]
        if index < len(keys):
            part = (num_tokens - keys[index - 1]) / (keys[index] - keys[index - 1])
            return low_s + part * (self._outline[keys[index]] - low_s)
        growing_s = low_s * math.pow(num_tokens / keys[-1], _GROWTH)
        if len(keys) == 1:
            return growing_s
        slope_s = (low_s - self._outline[keys[0]]) / (keys[-1] - keys[0])
        return max(growing_s, low_s + slope_s * (num_tokens - keys[-1]))

    def _neighbours(self, num_drafts: int, num_tokens: int) -> tuple[_Size | None, _Size | None]:
        """The nearest sizes: up to this one's, and beyond."""
        keys, curve = self._keys.get(num_drafts, []), self._curves.get(num_drafts, {})
        index = bisect_left(keys, _key(num_tokens))
        if index < len(keys) and keys[index] == _key(num_tokens):
            return curve[keys[index]], curve[keys[index]]
        below = curve[keys[index - 1]] if index else None
        above = curve[keys[index]] if index < len(keys) else None
        return below, above

    def _forget(self) -> None:
        """Sizes with drafts that were not timed lately."""
        for num_drafts, curve in self._curves.items():
            if num_drafts:
                oldest = self._num_steps - _MOST_AGE
                self._keys[num_drafts] = [key for key in self._keys[num_drafts] if curve[key].last_step >= oldest]
                self._curves[num_drafts] = {key: curve[key] for key in self._keys[num_drafts]}
        known = {key for curve in self._curves.values() for key in curve}
        self._all_keys = sorted(known)
        self._outline = {key: self._outline[key] for key in self._all_keys}

    def _at(self, size: _Size, num_context_tokens: int) -> float:
        """Its mean, had it been measured with this context."""
        mean_s = size.mean_s
        if size.num_steps < _NUM_SETTLING:
            # Perhaps that was no usual step: as others have it, if that is less, and so it is tried again.
            outline_s = self._outline_s(size.mean_tokens, without=_key(round(size.mean_tokens)))
            mean_s = mean_s if outline_s is None else min(mean_s, outline_s)
        slope = max(0.0, self._covariance / self._variance) if self._variance > 0.0 else 0.0
        return max(0.5 * mean_s, mean_s + slope * (num_context_tokens - size.mean_context))


def _key(num_tokens: int) -> int:
    if num_tokens <= _EXACT_SIZES:
        return num_tokens
    shift = num_tokens.bit_length() - 4
    return num_tokens >> shift << shift
