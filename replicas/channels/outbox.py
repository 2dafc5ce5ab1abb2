"""What one engine step has for a router, cut into frames that cost the router's event loop little each.

A frame is decoded in one go, and nothing else of the router runs meanwhile. Measured on 2 cores (AMD EPYC, Python
3.11): 4,096 prompt positions with 20 log-probabilities each held the router's event loop for 44 ms of CPU time when
they came in one frame (0.5 s on a loaded machine). In frames of NUM_ENTRIES entries, which take 1 to 4 ms each, and
with the turns of the token receiver bounded in bytes, it is 3.7 ms at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from replicas.messages import PromptLogprobs, Token, TokenLogprobs

# An entry is a token, a position of a prompt, or a candidate beside one of them.
NUM_ENTRIES = 4096

Cached = tuple[tuple[str, int], ...]
Drafted = tuple[tuple[str, int, int], ...]
Parts = tuple[tuple[str, ...], tuple[Token, ...], tuple[PromptLogprobs, ...], Cached, Drafted]


@dataclass(slots=True)
class Outbox:
    """admitted: request ids. In the order of these fields they are to leave: no token before its prompt's scores.
    cached: of prompts whose first tokens are among these, how many were found; they leave before all tokens.
    drafted: of requests that are told so, how many drafts there were and how many held; likewise.
    """

    admitted: list[str] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)
    drafted: list[tuple[str, int, int]] = field(default_factory=list)

    def parts(self) -> Iterator[Parts]:
        """(admitted, tokens, prompts, cached, drafted) of each frame. Very many tokens come from a beam search."""
        admitted, cached, drafted = tuple(self.admitted), tuple(self.cached), tuple(self.drafted)
        for prompt in self.prompts:
            for part in prompt_parts(prompt):
                yield admitted, (), (part,), cached, drafted
                admitted, cached, drafted = (), (), ()
        for start, end in _cuts([item.logprobs for item in self.tokens]):
            yield admitted, tuple(self.tokens[start:end]), (), cached, drafted
            admitted, cached, drafted = (), (), ()
        if admitted or drafted:
            yield admitted, (), (), cached, drafted


def prompt_parts(prompt: PromptLogprobs) -> Iterator[PromptLogprobs]:
    """All its positions in order. No part is empty."""
    for start, end in _cuts(prompt.positions):
        yield PromptLogprobs(prompt.request_id, prompt.start + start, prompt.positions[start:end])


def _cuts(scores: Sequence[TokenLogprobs | None]) -> Iterator[tuple[int, int]]:
    """(start, end) of parts of at most NUM_ENTRIES entries; a longer item is a part by itself."""
    start = num_entries = 0
    for index, scored in enumerate(scores):
        weight = 1 if scored is None else 1 + len(scored.top)
        if num_entries and num_entries + weight > NUM_ENTRIES:
            yield start, index
            start, num_entries = index, 0
        num_entries += weight
    if num_entries:
        yield start, len(scores)
