"""Where in a step a token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.plan import Accepted, Slice, StepPlan


class SamplePlace(NamedTuple):
    """One row of a step's logits. slot: whose parameters, rules and history count; next_slot: who feeds the token.

    They differ where a prompt ends: its n first tokens are all chosen by the prompt's own slot.
    """

    slot: int
    choice: int
    position: int  # index in prompt + output of the token to choose
    next_slot: int
    # The token that was guessed to stand there: what is chosen behind it counts only if this one is chosen here. None:
    # nothing of the slice is behind it, or only the device knows.
    guess: int | None = None

    @staticmethod
    def all_of(plan: StepPlan) -> list[SamplePlace]:
        """Of every token that the plan samples, in its order."""
        places = []
        for part in plan.slices:
            if part.num_sampled == 1:
                places.append(SamplePlace(part.slot, part.choice, part.start + part.num_tokens, part.slot))
            elif part.num_sampled:
                places += _of_several(part)
            if part.forks:
                places += [SamplePlace(part.slot, fork.choice, part.end, fork.slot) for fork in part.forks]
        return places


def _of_several(part: Slice) -> list[SamplePlace]:
    known = part.token_ids[max(0, len(part.token_ids) - part.num_sampled + 1) :]
    # Drafts that only the device knows are guesses that nobody can name here.
    guesses = (*(None,) * (part.num_sampled - 1 - len(known)), *known, None)
    first = part.end - part.num_sampled + 1
    return [
        SamplePlace(part.slot, part.choice, position, part.slot, guess)
        for position, guess in enumerate(guesses, start=first)
    ]


def counting(places: Sequence[SamplePlace], token_ids: Sequence[int]) -> list[bool]:
    """Of each token chosen, whether it counts: whether all guesses in front of it, in its slice, were right.

    What is no token counts only if it stands behind none: the next row comes to that place again, by itself.
    """
    counts = []
    is_right, is_behind = True, False
    for place, token_id in zip(places, token_ids, strict=True):
        counts.append(is_right and (token_id >= 0 or not is_behind))
        is_behind = place.guess is not None
        is_right = not is_behind or (is_right and place.guess == token_id)
    return counts


def settled_by_device(plan: StepPlan, numbers: Sequence[tuple[int, int]]) -> tuple[list[bool], tuple[Accepted, ...]]:
    """The same where a device has compared drafts that the host does not know. numbers: of each of the plan's rows, how
    many of its tokens count, and how many drafts it had."""
    counts: list[bool] = []
    accepted = []
    for row, (num_accepted, num_drafted) in zip(plan.rows, numbers, strict=True):
        counts += [index < num_accepted for index in range(row.num_sampled)]
        if row.num_drafts:
            accepted.append(Accepted(row.request_id, row.choice, num_accepted, 1 + row.num_drafts, num_drafted))
    counts += [True] * sum(len(chunk.sampled_choices) for chunk in plan.chunks)
    return counts, tuple(accepted)


def accepted_of(plan: StepPlan, counts: Sequence[bool]) -> tuple[Accepted, ...]:
    """How many tokens count of each slice with guesses, or with room for drafts. counts: of each token that the plan
    samples, whether so. Of a slice with drafts the plan has those that were found, as guesses."""
    accepted = []
    first = 0
    for part in plan.slices:
        if part.num_sampled > 1 or part.num_drafts:
            num_accepted = sum(counts[first : first + part.num_sampled])
            num_planned = max(part.num_sampled, 1 + part.num_drafts)
            num_drafted = part.num_sampled - 1 if part.num_drafts else 0
            accepted.append(Accepted(part.request_id, part.choice, num_accepted, num_planned, num_drafted))
        first += part.num_sampled + len(part.forks)
    return tuple(accepted)
