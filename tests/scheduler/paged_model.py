"""A pretended model over a pretended paged pool, which makes every misplaced block a wrong token.

A pool cell holds what was written there: a token and its position. A token is sampled as a hash of the whole
context as read back through the block table, and of seed, choice and position. The reference below computes
the same without any blocks. So a stale table entry, a missed copy, a block reused too early or a wrong order
shows as a different token, and from there on as a different text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Row
from dataclasses import dataclass
from functools import lru_cache

from scheduler.beam_search import BeamSearch, Candidate
from scheduler.plan import Accepted, BlockSwap, SampledToken, Slice, SlotInit, StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import TokenLogprobs

VOCAB_SIZE = 1 << 31
BEAM_VOCAB_SIZE = 30
_EMPTY = -1


def cell(token_id: int, position: int) -> int:
    return token_id << 16 | position


def _sampled(context: Row[int], seed: int, choice: int, position: int) -> int:
    return hash((tuple(context), seed, choice, position)) % VOCAB_SIZE


def _offered(context: Row[int], seed: int, count: int) -> tuple[Candidate, ...]:
    """The most likely next tokens of a beam."""
    text = tuple(context)
    log_probs = [(token_id, -(hash((text, seed, token_id)) % 1_000_003) / 2e5) for token_id in range(BEAM_VOCAB_SIZE)]
    return tuple(sorted(log_probs, key=lambda candidate: -candidate[1])[:count])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a choice of a request should generate."""

    token_ids: tuple[int, ...]
    finish_reason: str


def reference_tokens(prompt_ids: Row[int], choice: int, seed: int, max_tokens: int) -> list[int]:
    """The first max_tokens tokens, stop tokens ignored."""
    context = [cell(token_id, position) for position, token_id in enumerate(prompt_ids)]
    tokens = []
    for _ in range(max_tokens):
        tokens.append(_sampled(context, seed, choice, len(context)))
        context.append(cell(tokens[-1], len(context)))
    return tokens


def reference_search(prompt_ids: Row[int], search: BeamSearch, seed: int) -> BeamSearch:
    """The search at its end."""
    count = search.params.num_candidates(len(search.stop_token_ids))
    while not search.is_over:
        texts = [(*prompt_ids, *beam.token_ids) for beam in search.beams]
        contexts = [[cell(token_id, position) for position, token_id in enumerate(text)] for text in texts]
        search = search.advance([_offered(context, seed, count) for context in contexts])
    return search


def until_stop(token_ids: Row[int], stop_token_ids: frozenset[int]) -> Answer:
    for index, token_id in enumerate(token_ids):
        if token_id in stop_token_ids:
            return Answer(tuple(token_ids[: index + 1]), "stop")
    return Answer(tuple(token_ids), "length")


class OracleDrafts:
    """Knows what will be sampled, and says so, each time with the probability right; it drafts any number of tokens."""

    def __init__(self, seed: int, right: float) -> None:
        self._rng, self._right = random.Random(seed), right
        self.num_drafted = self.num_held = self.num_none = 0

    def draft(self, init: SlotInit, position: int, most: int) -> tuple[int, ...]:
        """At most so many tokens behind the one at `position`."""
        rng, prompt_ids = self._rng, init.context.prompt_ids
        first = position + 1 - len(prompt_ids)
        tokens = _cached_tokens(prompt_ids, init.choice, init.sampling.seed, first + most)[first:]
        tokens = tokens[: rng.choice([0, most, rng.randint(0, most)])]
        self.num_none += not tokens
        return tuple([token_id if rng.random() < self._right else token_id + 1 for token_id in tokens])


@lru_cache(10_000)
def _cached_tokens(prompt_ids: tuple[int, ...], choice: int, seed: int, count: int) -> list[int]:
    return reference_tokens(prompt_ids, choice, seed, count)


class PagedRunner:
    """Applies plans to the letter, as replicas.model.model_runner, replicas.sampling.slot_state and
    replicas.speculation.drafting_runner do."""

    def __init__(
        self, limits: PoolLimits, max_blocks: int, num_host_blocks: int = 0, drafts: OracleDrafts | None = None
    ) -> None:
        self._block_size = limits.block_size
        self.blocks = [[_EMPTY] * limits.block_size for _ in range(limits.num_blocks)]
        self.host: list[list[int]] = [[] for _ in range(num_host_blocks)]
        self._digests = [hash(())] * num_host_blocks
        self.num_fetched = self.num_damaged = 0  # cached host blocks that were copied back; of these wrong ones
        self.table = [[0] * max_blocks for _ in range(limits.max_sequences)]
        self._last_token = [0] * limits.max_sequences
        self._sampling = [SamplingParams()] * limits.max_sequences
        self._drafts = drafts
        self._length: list[int | None] = [None] * limits.max_sequences
        self._inits: dict[int, SlotInit] = {}

    def run(self, plan: StepPlan) -> StepOutput:
        """One step. Writes all KV of the step before anything reads, as a layer does."""
        self._prepare(plan)
        damaged = self._fetch(plan)
        slices = [part if part.is_prompt else self._resolved(part) for part in plan.slices]
        for part in slices:
            own = [] if part.is_prompt else [self._last_token[part.slot]]
            assert len(own) + len(part.token_ids) == part.num_tokens
            for position, token_id in enumerate((*own, *part.token_ids), start=part.start):
                self._write(part.slot, position, token_id)
        sampled: list[SampledToken] = []
        accepted: list[Accepted] = []
        fed: dict[int, tuple[int, int]] = {}
        for part in slices:
            tokens = self._sample_behind_guesses(part)
            if part.num_drafts:
                num_drafted = part.num_tokens - 1
                accepted.append(Accepted(part.request_id, part.choice, len(tokens), 1 + part.num_drafts, num_drafted))
                assert self._drafts is not None
                self._drafts.num_drafted += num_drafted
                self._drafts.num_held += len(tokens) - 1
            elif part.num_sampled > 1:
                accepted.append(Accepted(part.request_id, part.choice, len(tokens), part.num_sampled))
            if tokens:
                fed[part.slot] = tokens[-1].token_id, part.end - part.num_sampled + len(tokens)
            sampled += tokens
            for fork in part.forks:
                sampled.append(self._sample(part.request_id, part.slot, fork.choice, part.end))
                fed[fork.slot] = sampled[-1].token_id, part.end
        for slot, (token_id, position) in fed.items():
            self._last_token[slot], self._length[slot] = token_id, position
        for swap in plan.saves:
            self._swap_out(swap)
        return StepOutput(plan.step_id, tuple(sampled), accepted=tuple(accepted), damaged=damaged)

    def _resolved(self, row: Slice) -> Slice:
        """Where its slot is, with the drafts that there are for it."""
        length = self._length[row.slot]
        assert length is None or length <= row.start, "it has got further than it could"
        start = row.start if length is None else length
        if not row.num_drafts:
            return row._replace(start=start)
        assert self._drafts is not None
        drafts = self._drafts.draft(self._inits[row.slot], start, row.num_drafts)
        count = 1 + len(drafts)
        return row._replace(start=start, num_tokens=count, num_sampled=count, token_ids=drafts)

    def _swap_out(self, swap: BlockSwap) -> None:
        self.host[swap.host] = list(self.blocks[swap.device])
        self._digests[swap.host] = hash(tuple(self.host[swap.host]))

    def _fetch(self, plan: StepPlan) -> tuple[BlockSwap, ...]:
        """Those that brought something else than went out."""
        for swap in plan.fetches:
            self.blocks[swap.device] = list(self.host[swap.host])
        damaged = tuple(s for s in plan.fetches if hash(tuple(self.host[s.host])) != self._digests[s.host])
        self.num_fetched += len(plan.fetches)
        self.num_damaged += len(damaged)
        return damaged

    def _sample_behind_guesses(self, part: Slice) -> list[SampledToken]:
        """At the last num_sampled positions, as long as what stands there was sampled just now."""
        tokens: list[SampledToken] = []
        for index in range(part.num_sampled):
            position = part.end - part.num_sampled + 1 + index
            if tokens and tokens[-1].token_id != part.token_ids[position - 1 - part.end]:
                break
            tokens.append(self._sample(part.request_id, part.slot, part.choice, position))
        return tokens

    def _prepare(self, plan: StepPlan) -> None:
        for init in plan.slot_inits:
            self._sampling[init.slot] = init.sampling
            self._length[init.slot], self._inits[init.slot] = init.last_position, init
            if init.last_token is not None:
                self._last_token[init.slot] = init.last_token
        for write in plan.table_writes:
            entries = self.table[write.slot]
            assert write.start + len(write.block_ids) <= len(entries), "a table write beyond the table"
            entries[write.start : write.start + len(write.block_ids)] = write.block_ids
        for swap in plan.swap_outs:
            self._swap_out(swap)
        for swap in plan.swap_ins:
            self.blocks[swap.device] = list(self.host[swap.host])
        for copy in plan.copies:
            self.blocks[copy.destination] = list(self.blocks[copy.source])

    def _write(self, slot: int, position: int, token_id: int) -> None:
        block_id = self.table[slot][position // self._block_size]
        self.blocks[block_id][position % self._block_size] = cell(token_id, position)

    def _sample(self, request_id: str, slot: int, choice: int, position: int) -> SampledToken:
        """The token at `position`, given everything before it; of a beam, what it may be."""
        cells: list[int] = []
        for block_id in self.table[slot][: -(-position // self._block_size)]:
            cells += self.blocks[block_id]
        context, sampling = cells[:position], self._sampling[slot]
        token_id = _sampled(context, sampling.seed, choice, position)
        if sampling.num_logprobs is None:
            return SampledToken(request_id, choice, token_id)
        offered = _offered(context, sampling.seed, sampling.num_logprobs)
        return SampledToken(request_id, choice, token_id, TokenLogprobs(0.0, offered))
