"""Running beam searches: what a selection means for block tables and slots.

The next row of a beam depends on which beams live on, and that on the tokens of all: so a search takes part in a step
only when its last one is committed (with a lag of one, in every other step): `Request.needs_known_tokens`.

A selection changes tables, never contents. Sequence i has beam i. It gets its parent's table, shared block by block;
the batch copies the last block when several write into it, as after any fork. Nothing in flight reads what a beam that
does not live on lets go of, since none of the search's rows are in flight.
"""

from __future__ import annotations

from scheduler.beam_search import BeamSearch, Candidate
from scheduler.block_allocator import BlockAllocator
from scheduler.generated_token import Token
from scheduler.plan_builder import PlanBuilder
from scheduler.request import Request, Sequence

# Why a sequence rests that has no beam: there were fewer candidates than beams (a vocabulary of a few tokens).
PRUNED = "pruned"


class BeamBatcher:
    """The searches whose candidates have come in with the step being committed."""

    def __init__(self, allocator: BlockAllocator, builder: PlanBuilder) -> None:
        self._allocator = allocator
        self._builder = builder
        self._ready: dict[str, Request] = {}

    def take(self, request: Request, sequence: Sequence, candidates: tuple[Candidate, ...]) -> None:
        """A beam's candidates, or those of the prompt for its first sequence. Mutates."""
        sequence.candidates = candidates
        self._ready[request.request_id] = request

    def select(self) -> list[Request]:
        """Move the searches on whose candidates were taken; those that are over by that. Mutates."""
        ready, self._ready = list(self._ready.values()), {}
        return [request for request in ready if not request.is_over and self._advance(request)]

    def _advance(self, request: Request) -> bool:
        assert request.search is not None
        num_beams = len(request.search.beams)
        request.search = request.search.advance([s.candidates for s in request.sequences[:num_beams]])
        if request.search.is_over:
            return True
        self._fork(request, request.search)
        return False

    def _fork(self, request: Request, search: BeamSearch) -> None:
        tables = [request.sequences[beam.parent].block_ids for beam in search.beams]
        num_planned = request.sequences[0].num_planned
        let_go: list[int] = []
        for sequence, beam, table in zip(request.sequences, search.beams, tables, strict=False):
            start = _first_difference(sequence.block_ids, table)
            # Everybody's share is taken before anybody lets go: a block may pass from one beam to another.
            self._allocator.share(table[start:])
            let_go += sequence.block_ids[start:]
            sequence.block_ids = list(table)
            sequence.num_known = sequence.num_planned = num_planned
            sequence.finish_reason = None
            self._builder.init_slot(request.slot_init(sequence, beam.token_ids[-1]))
            if start < len(table):
                self._builder.write_table(sequence.slot, start, tuple(table[start:]))
        for sequence in request.sequences[len(search.beams) :]:
            let_go += sequence.block_ids
            sequence.block_ids = []
            sequence.finish_reason = PRUNED
        self._allocator.release(let_go)


def hypothesis_tokens(request: Request) -> list[Token]:
    """The best hypotheses of a search that is over, as the tokens of choices 0, 1, ..."""
    assert request.search is not None
    return [
        Token(
            request.request_id,
            choice,
            index,
            token_id,
            hypothesis.finish_reason if index == len(hypothesis.token_ids) - 1 else None,
        )
        for choice, hypothesis in enumerate(request.search.hypotheses[: request.spec.num_returned])
        for index, token_id in enumerate(hypothesis.token_ids)
    ]


def _first_difference(old: list[int], new: list[int]) -> int:
    """Length of the common beginning of two tables."""
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            return index
    return min(len(old), len(new))
