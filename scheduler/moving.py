"""Requests on their way from one engine to another while they are decoded: what leaves here, what goes on here.

Out: running -> no more rows -> what is in flight is committed -> its blocks wait for their reader under a lease.
In: admitted -> its blocks are read -> running, from the token behind the last one that the other engine committed.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.admission import distinct_blocks
from scheduler.giving_way import GivingWay
from scheduler.memory_budget import num_blocks_for
from scheduler.moved_choice import MovedChoice, check_moved
from scheduler.outcome import Load
from scheduler.request import Request, RequestState, Sequence


@dataclass(frozen=True, slots=True)
class MovedOut:
    """A request that has stopped between two tokens. block_ids: each once, the prompt's first. tables: of each choice
    that goes on its number, how many tokens of it are known, and its blocks as places in block_ids."""

    request_id: str
    block_ids: tuple[int, ...]
    tables: tuple[tuple[int, int, tuple[int, ...]], ...]


class Moving(GivingWay):
    """Both directions. The Scheduler, built on it, says what requests compute meanwhile."""

    # -- out ---------------------------------------------------------------------------------------

    def why_stays(self, request_id: str) -> str:
        """Why this request can't be moved now; empty if it can."""
        request = self.get(request_id)
        if request is None:
            return "it is over, or was never here"
        if request.search is not None:
            return "beams are not moved"
        if request.state is not RequestState.RUNNING or request_id in self._moving_out:
            return "it is not running"
        return ""

    def move_out(self, request_id: str) -> None:
        """Plan no more rows for it; `take_moved_out` names it when its tokens are known. Mutates. It must be one that
        may be moved."""
        request = self._requests[request_id]
        assert not self.why_stays(request_id), f"{request_id}: {self.why_stays(request_id)}"
        self._moving_out[request_id] = request
        self.batch.pause(request)

    def take_moved_out(self, now_s: float) -> tuple[MovedOut, ...]:
        """Who has stopped and is known as far as it got: from now on the transfer holds the blocks. Who has ended
        meanwhile is not named. Mutates."""
        if not self._moving_out:
            return ()
        ready = [r for r in self._moving_out.values() if r.is_over or self.decode_lane.is_done_with(r)]
        for request in ready:
            del self._moving_out[request.request_id]
        return tuple(self._lease_running(request, now_s) for request in ready if not request.is_over)

    def _lease_running(self, request: Request, now_s: float) -> MovedOut:
        live = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        tables = [self._written(request, sequence) for sequence in live]
        block_ids = tuple(distinct_blocks(tables))
        place_of = {block_id: place for place, block_id in enumerate(block_ids)}
        moved = [
            (sequence.choice, sequence.num_known, tuple([place_of[block_id] for block_id in table]))
            for sequence, table in zip(live, tables, strict=True)
        ]
        self.batch.discard(request.request_id)
        self._hold(request.request_id, block_ids)
        request.enter(RequestState.LEASED, now_s)
        request.last_step_id = -1  # no step of any lane computes on its blocks again
        self._release(request)
        self.budget.shrink(request.request_id, len(block_ids) - request.num_shared)
        return MovedOut(request.request_id, block_ids, tuple(moved))

    def _written(self, request: Request, sequence: Sequence) -> list[int]:
        """Blocks with KV of a sequence that has nothing in flight."""
        assert sequence.num_planned == sequence.num_known, "a token of it is not known"
        num_tokens = request.prompt_len + sequence.num_known - 1
        return sequence.block_ids[: num_blocks_for(num_tokens, self.limits.block_size)]

    # -- in ----------------------------------------------------------------------------------------

    def begin_moved_load(
        self, request_id: str, choices: tuple[MovedChoice, ...], num_blocks: int, now_s: float
    ) -> Load:
        """As `begin_load`, of one that the other engine has stopped: num_blocks blocks, and tables of its choices.
        Choices that are not named have ended there. Mutates. Raises ValueError, and then nothing has changed, for what
        is not this request's, and when there is no room: it has become longer than was told."""
        request = self._requests[request_id]
        self._check_choices(request, choices, num_blocks)
        kept = list(request.sequences[0].block_ids)
        num_new = num_blocks - len(kept)
        room = self._unloaded[request_id] + min(self._num_available, self.free_blocks())
        if num_new > room:
            raise ValueError(f"it needs {num_new} blocks here, {room} are free")
        request.enter(RequestState.LOADING, now_s)
        del self._unloaded[request_id]
        new = self.allocator.allocate(num_new, after=kept[-1] if kept else None)
        self._hold(request_id, new)
        blocks = (*kept, *new)
        self._lay_tables(request, choices, blocks)
        return Load(blocks, len(kept))

    def _check_choices(self, request: Request, choices: tuple[MovedChoice, ...], num_blocks: int) -> None:
        if request.search is not None:
            raise ValueError("beams are not moved")
        wrong = {moved.choice for moved in choices}.difference(request.spec.choices)
        if not choices or wrong:
            raise ValueError(f"choices {sorted(wrong)} are not of {list(request.spec.choices)}, or there are none")
        if any(len(moved.token_ids) >= request.spec.max_tokens for moved in choices):
            raise ValueError("a choice has all its tokens")
        check_moved(choices, request.prompt_len, num_blocks, self.limits.block_size)

    def _lay_tables(self, request: Request, choices: tuple[MovedChoice, ...], blocks: tuple[int, ...]) -> None:
        """The first sequence has the whole prompt from now on; who has ended elsewhere has nothing. Mutates."""
        places_of = {moved.choice: moved.places for moved in choices}
        request.sequences.sort(key=lambda sequence: sequence.choice not in places_of)
        request.sequences[0].block_ids, seen = [], set[int]()
        for sequence in request.sequences:
            if (places := places_of.get(sequence.choice)) is None:
                sequence.finish_reason = "elsewhere"
                sequence.block_ids = []
                continue
            sequence.block_ids = [blocks[place] for place in places]
            self.allocator.share([block_id for block_id in sequence.block_ids if block_id in seen])
            seen.update(sequence.block_ids)

    def moved_in(self, request_id: str, choices: tuple[MovedChoice, ...], now_s: float) -> None:
        """The KV is here and confirmed: go on behind the tokens that are known. choices: as given to
        `begin_moved_load`. Mutates. The read is over, so the transfer lets go here."""
        request = self._requests[request_id]
        request.enter(RequestState.RUNNING, now_s)
        self.transfer_ended(request_id)
        token_ids_of = {moved.choice: moved.token_ids for moved in choices}
        live = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        for sequence in live:
            token_ids = token_ids_of[sequence.choice]
            sequence.num_planned = sequence.num_known = len(token_ids)
            self.builder.init_slot(request.slot_init(sequence, token_ids[-1], token_ids[:-1]))
            self.builder.write_table(sequence.slot, 0, tuple(sequence.block_ids))
        if self.prefixes is not None:
            self.prefixes.loaded(request)
        self._join(request, self.builder.next_step_id)
        for sequence in live:
            self._name_output(request, sequence, token_ids_of[sequence.choice])

    def _name_output(self, request: Request, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """What was read of a choice's output can be found, as if it had been computed here. Mutates."""
        if sequence.chain is None or self.prefixes is None:
            return
        for token_id in token_ids:
            sequence.chain.ids.append(token_id)
            if len(sequence.chain.ids) > self.limits.block_size:
                self.prefixes.filled(request, sequence)

    def _join(self, request: Request, first_step: int) -> None:
        """Its sequences have their blocks: they are rows from this step on. Mutates."""
        if self.prefixes is not None:
            self.prefixes.begin_output(request)
        self.batch.add(request)
        self.budget.running(request, first_step)
