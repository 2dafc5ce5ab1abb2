"""How many of a card's multiprocessors the prefill lane gets, for the prompts that it computes next.

Pure. The decode lane may use the whole card at any time, and is slowed down by what the prefill lane has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneShare:
    """One way to divide a card. num_processors: the prefill lane's; None: all of them. The rates are those of both
    lanes, while they run side by side, as parts of what each has alone on the whole card.
    """

    num_processors: int | None
    prefill_rate: float
    decode_rate: float

    @property
    def gain(self) -> float:
        """Work done, where doing one thing after the other would be 1."""
        return self.prefill_rate + self.decode_rate


ALONE = LaneShare(None, 1.0, 1.0)  # the other lane has nothing to do, or takes nothing away
WHOLE_CARD = LaneShare(None, 1.0, 0.1)  # for prompts with nothing beside; rows that come meanwhile have little

# Parts of the card that the prefill lane leaves alone, and both rates: an H200's, Llama-3.1-8B, 2,048 tokens of prompts
# beside 16 rows. Few, as each takes graphs of its own; and turns of these two do more than any share between them does
# (the sum of both rates is 1.15 to 1.17 here, 1.13 to 1.15 there). With fewer left alone steps of rows take almost
# three times as long, which no queue is worth.
_ESTIMATES = ((40 / 132, 0.63, 0.52), (64 / 132, 0.48, 0.69))
_GROUP = 8  # multiprocessors; every card can be divided by a multiple of so many


def estimated_shares(num_processors: int) -> tuple[LaneShare, ...]:
    """Ways to divide a card of so many multiprocessors, as far as they differ. What rates they really have is measured
    at start (`lane_measurement`)."""
    shares: dict[int, LaneShare] = {}
    for part, prefill_rate, decode_rate in _ESTIMATES:
        count = num_processors - max(1, round(part * num_processors / _GROUP)) * _GROUP
        if count > 0:
            shares.setdefault(count, LaneShare(count, prefill_rate, decode_rate))
    return tuple(shares.values())


@dataclass(frozen=True, slots=True)
class LaneObjectives:
    """ttft_s: longest time to a first token. token_gap_s: longest gap between two tokens of a stream."""

    ttft_s: float = 1.0
    token_gap_s: float = 0.05


@dataclass(frozen=True, slots=True)
class LaneRates:
    """On the whole card, with nothing beside, as measured lately. 0.0: not yet."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """num_prompt_tokens: in no step yet, and in the one to come. oldest_wait_s: of the prompt that waits longest, those
    in flight included. num_rows: of the decode lane, now or soon.
    """

    num_prompt_tokens: int
    oldest_wait_s: float
    num_rows: int
    rates: LaneRates = LaneRates()


# As choose_share, for simulations of other rules.
ShareChooser = Callable[[LaneLoad, LaneObjectives, Sequence[LaneShare]], LaneShare]


def choose_share(load: LaneLoad, objectives: LaneObjectives, shares: Sequence[LaneShare]) -> LaneShare:
    """The share for the prompts that come next; the whole card where nothing runs beside them. ALONE: it has no shares.

    Of those that keep both objectives the one with the most for prompts: what rows do not need is a first token sooner.
    If none keeps both, the one that misses its objective the least, as a ratio: many rows take multiprocessors, a queue
    that waits too long takes them back. Which share does the most work in all is not asked: they differ by less than
    their rates can be measured.
    """
    if not shares:
        return ALONE
    if not load.num_rows:
        return WHOLE_CARD

    def misses(share: LaneShare) -> tuple[float, float]:
        itl = load.rates.decode_step_s / share.decode_rate / objectives.token_gap_s
        wait_s = load.oldest_wait_s
        if load.rates.prefill_tokens_per_s > 0.0:
            wait_s += load.num_prompt_tokens / (load.rates.prefill_tokens_per_s * share.prefill_rate)
        return max(1.0, itl, wait_s / objectives.ttft_s), -share.prefill_rate

    return min(shares, key=misses)
