"""What an engine finds and keeps by content for its requests: from a prompt's arrival to its last committed token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.block_allocator import BlockAllocator
from scheduler.block_chain import OutputChain, prompt_chain
from scheduler.host_cache import HostCache
from scheduler.memory_budget import Budget
from scheduler.prefix_cache import BlockName, PrefixCache
from scheduler.prefix_hash import chain_start
from scheduler.request import Request, Sequence
from scheduler.shared_blocks import SharedBlocks


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """fingerprint: of what computes the KV; engines with the same can exchange it. reads_rest: whether what is here of
    a prompt is left out when the rest of its KV is read. on_piece: as `PrefixCache`. uses_host: whether what goes here
    is kept in host memory for prompts that are computed, where there is some."""

    fingerprint: str
    reads_rest: bool = True
    on_piece: Callable[[bytes], None] | None = None
    uses_host: bool = False


class PrefixStats(NamedTuple):
    """Ever. Tokens of the prompts that were looked up, and of these those that were found on the device, or in host
    memory (of those that wait for it nothing is counted yet); cached blocks given away."""

    num_looked_up_tokens: int
    num_found_tokens: int
    num_evicted_blocks: int
    num_host_tokens: int = 0


class PrefixBook:
    """Engine thread only."""

    def __init__(
        self,
        options: PrefixOptions,
        cache: PrefixCache,
        allocator: BlockAllocator,
        budget: Budget,
        block_size: int,
        get: Callable[[str], Request],
        host: HostCache,
    ) -> None:
        """get: a request that holds anything, by its id."""
        self.cache = cache
        self.host = host
        self.shared = SharedBlocks()
        self.num_looked_up_tokens = 0
        self.num_found_tokens = 0
        self._options = options
        self._allocator, self._budget, self._block_size, self._get = allocator, budget, block_size, get

    def stats(self) -> PrefixStats:
        """Any thread."""
        return PrefixStats(self.num_looked_up_tokens, self.num_found_tokens, self.cache.num_evicted)

    # -- before its prompt is computed or read -----------------------------------------------------

    def submitted(self, request: Request) -> None:
        """Its blocks get their names. Mutates the request. Raises OverflowError for ids that are no tokens."""
        start = chain_start(self._options.fingerprint, request.spec.cache_salt)
        request.chain = prompt_chain(start, request.spec.prompt_ids, self._block_size)

    def guess(self, request: Request) -> int:
        """How many of the blocks that it would find somebody holds. Cheap, and nearly always right."""
        assert request.chain is not None
        return self.cache.guess(request.chain, self.most(request))[1]

    def find(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of its prompt: full ones, and never the whole prompt, as its last token's
        logits are wanted."""
        assert request.chain is not None
        return self.cache.find(request.chain, self.most(request))

    def most(self, request: Request) -> int:
        """How many blocks it may find."""
        spec = request.spec
        if not spec.use_cache or not (request.local_prefill or self._options.reads_rest):
            return 0
        if request.local_prefill and spec.sampling.num_prompt_logprobs is not None:
            return 0  # each of its tokens is scored by the hidden state before it, and no such is kept
        return (request.prompt_len - 1) // self._block_size

    def held(self, block_ids: list[int]) -> list[int]:
        """Of the blocks that were found, those that somebody holds."""
        return self.cache.held(block_ids)

    def take(self, request: Request, block_ids: list[int]) -> None:
        """The request, which was promised memory, holds what was found for it; `held` blocks are its num_shared.
        Mutates."""
        assert request.chain is not None
        request.generation = self.cache.generation
        if self.most(request):
            self.num_looked_up_tokens += request.prompt_len
        if not block_ids:
            return
        request.num_cached, request.num_entered = len(block_ids) * self._block_size, len(block_ids)
        self.num_found_tokens += request.num_cached
        held = self.cache.held(block_ids)
        for request_id, num_joined in self.shared.would_join(held).items():
            self._get(request_id).num_shared += num_joined
        self.shared.join(held)
        if len(held) < len(block_ids):
            self.shared.own(request.request_id, set(block_ids).difference(held))
        self._allocator.use(block_ids, request.chain)

    def key(self, request: Request, place: int) -> bytes:
        """Of a block of its prompt."""
        assert request.chain is not None
        return request.chain.keys[place]

    def let_go(self, request: Request, block_ids: Iterable[int]) -> None:
        """The request holds these blocks no more, by no sequence and no transfer; each is named once. Mutates."""
        left = self.shared.leave(block_ids)
        request.num_shared -= left.num_shared
        self._budget.num_shared -= left.num_gone

    # -- what is committed -------------------------------------------------------------------------

    def computed(self, request: Request, end: int) -> None:
        """Its prompt is computed up to position `end`: it can be found. Mutates."""
        self._enter_prompt(request, end // self._block_size)

    def loaded(self, request: Request) -> None:
        """Its prompt's KV was read, and what was read is what the source computed. Mutates."""
        self._enter_prompt(request, request.prompt_len // self._block_size)

    def came_back(self, request: Request, num_blocks: int) -> None:
        """So many blocks of its prompt are here, some of them from host memory. Mutates."""
        self._enter_prompt(request, num_blocks)

    def _enter_prompt(self, request: Request, num_blocks: int) -> None:
        """Its first num_blocks blocks are computed, read or copied back."""
        chain, table = request.chain, request.sequences[0].block_ids
        if chain is None or request.generation != self.cache.generation or num_blocks > len(table):
            return  # it has given way meanwhile
        if num_blocks > request.num_entered:
            places = range(request.num_entered, num_blocks)
            self.shared.own(request.request_id, self.cache.enter_prompt(chain, table, places))
            request.num_entered = num_blocks

    def begin_output(self, request: Request) -> None:
        """Its choices part from here on, each with names of its own. Not of a beam search: which texts live on is only
        known later. Mutates."""
        chain = request.chain
        if chain is None or request.search is not None:
            return
        num_full = len(chain.keys)
        for sequence in request.sequences:
            rest = list(request.spec.prompt_ids[num_full * self._block_size :])
            sequence.chain = OutputChain(chain.parent(num_full), num_full, rest)

    def filled(self, request: Request, sequence: Sequence) -> None:
        """One more block of the choice is full, by tokens that count. Mutates."""
        chain = sequence.chain
        assert chain is not None
        index, parent = chain.index, chain.parent
        key, ids = chain.next_block(self._block_size)
        # Without a table it is preempted: its blocks are on their way out.
        if request.generation == self.cache.generation and index < len(sequence.block_ids):
            block_id = sequence.block_ids[index]
            if self.cache.enter(block_id, BlockName(key, parent, ids, index)):
                self.shared.own(request.request_id, (block_id,))

    def forget(self, block_ids: Iterable[int] | None = None) -> None:
        """What is in these blocks is not trusted any more, nor what was computed from it; None: in all. Mutates."""
        names = [] if block_ids is None else self.host.names()
        self.host.forget(None if block_ids is None else self.cache.keys_from(block_ids, names))
        self._allocator.forget_contents(block_ids, names)
