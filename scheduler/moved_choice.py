"""A choice of a request that is decoded at one engine and goes on at another: its tokens, and where its KV lies."""

from __future__ import annotations

from typing import NamedTuple


class MovedChoice(NamedTuple):
    """token_ids: all that it has generated in this attempt; the last one's KV is not written yet. places: its block
    table, each block as its place among the blocks that are handed over, which name what choices share only once."""

    choice: int
    token_ids: tuple[int, ...]
    places: tuple[int, ...]


def check_moved(choices: tuple[MovedChoice, ...], prompt_len: int, num_blocks: int, block_size: int) -> None:
    """Raises ValueError for what no engine offers: tables that are too short or too long, lead nowhere, leave a block
    out, or do not begin with the first choice's."""
    first_full = tuple(range(prompt_len // block_size))  # what all share of the prompt
    for choice, token_ids, places in choices:
        num_needed = -(-(prompt_len + len(token_ids) - 1) // block_size)
        if not token_ids or len(places) != num_needed:
            raise ValueError(f"choice {choice}: {len(places)} blocks for {prompt_len} + {len(token_ids)} tokens")
        if places[: len(first_full)] != first_full:
            raise ValueError(f"choice {choice} does not begin with the prompt's blocks")
    named = {place for moved in choices for place in moved.places}
    if named != set(range(num_blocks)):
        raise ValueError(f"tables of {len(named)} blocks for {num_blocks}")
    if len({moved.choice for moved in choices}) != len(choices):
        raise ValueError("a choice is named twice")
