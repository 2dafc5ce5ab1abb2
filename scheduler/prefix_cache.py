"""Which blocks hold KV that can be found by its content, and which of them goes first when memory is wanted.

A block has a name (its key, the key that it builds on, its ids) from the commit of the step that filled it until it is
evicted. Nobody writes into a block that has a name. While somebody owns it, it is the allocator's like any other; then
it is idle: it stays, and is given away only when nothing else is free. The least recently used goes first, and what a
block builds on never goes before it. (While somebody owns a block, what it builds on may go if its owner has another
one of that content: two prompts that began alike were computed side by side. Until that is computed once more nobody
finds the block, and it goes when it is the least recently used.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from scheduler.block_chain import PromptChain

# Every so many blocks of a chain somebody who listens is told that they are here (`on_piece`).
PIECE_BLOCKS = 16


class BlockName(NamedTuple):
    """What a block holds. place: in its sequence, from 0; parent: the key of the one before, or the chain's start."""

    key: bytes
    parent: bytes
    ids: bytes
    place: int


class PrefixCache:
    """Names of blocks of one pool. Engine thread only. num_...: ever."""

    def __init__(self, on_piece: Callable[[bytes], None] | None = None, *, has_host: bool = False) -> None:
        """on_piece: is given the key of each PIECE_BLOCKS-th block of a chain, when it is entered or found. has_host:
        somebody copies idle blocks to host memory (`next_unsaved`)."""
        self._block_of: dict[bytes, int] = {}
        self._names: dict[int, BlockName] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        # Of these, the ones that nobody was given to copy since they have been idle, in the same order.
        self._unsaved: OrderedDict[int, None] | None = OrderedDict() if has_host else None
        self._on_piece = on_piece
        self.generation = 0  # how often it was emptied or forgot something: requests from before enter nothing more
        self.num_evicted = 0

    def __len__(self) -> int:
        """Blocks with a name."""
        return len(self._names)

    @property
    def num_idle(self) -> int:
        """Of those, the ones that nobody owns."""
        return len(self._idle)

    def has_name(self, block_id: int) -> bool:
        return block_id in self._names

    def have_names(self, block_ids: Iterable[int]) -> bool:
        """All of them."""
        return self._names.keys() >= set(block_ids)

    def is_named(self, block_id: int, name: BlockName) -> bool:
        """Whether it still has this very name, which it has had without a break."""
        return self._names.get(block_id) is name

    def idle(self) -> tuple[int, ...]:
        """The least recently used first. O(idle)."""
        return tuple(self._idle)

    # -- what is found, what is entered ------------------------------------------------------------

    def guess(self, chain: PromptChain, most: int) -> tuple[int, int]:
        """How many of the first `most` blocks would be found, and how many of these somebody owns. O(log most).

        Right but for rare cases: what a block builds on may be gone while somebody owns the block.
        """
        keys, block_of, idle = chain.keys, self._block_of, self._idle
        found = bisect_left(range(most), True, key=lambda place: keys[place] not in block_of)
        return found, bisect_left(range(found), True, key=lambda place: block_of.get(keys[place]) in idle)

    def find(self, chain: PromptChain, most: int) -> list[int]:
        """Blocks that hold the first blocks of this chain, as many as are here, at most `most`. Ids are compared."""
        block_of, names = self._block_of, self._names
        found: list[int] = []
        parent, end, block_bytes = chain.start, 0, chain.block_bytes
        for place, key in enumerate(chain.keys[:most]):
            block_id = block_of.get(key)
            begin, end = end, end + block_bytes
            if block_id is None or names[block_id] != (key, parent, chain.ids[begin:end], place):
                break
            found.append(block_id)
            parent = key
        return found

    def held(self, block_ids: Iterable[int]) -> list[int]:
        """Of these blocks, which have names, those that somebody owns."""
        idle = self._idle
        return [block_id for block_id in block_ids if block_id not in idle]

    def use(self, block_ids: Sequence[int], chain: PromptChain) -> None:
        """These blocks of a chain, its first ones, have an owner again, or one more. Mutates."""
        for block_id in block_ids:
            self._idle.pop(block_id, None)
        if self._unsaved is not None:
            for block_id in block_ids:
                self._unsaved.pop(block_id, None)
        self._tell(chain, range(len(block_ids)))

    def enter_prompt(self, chain: PromptChain, table: Sequence[int], places: range) -> list[int]:
        """As `enter`, of several blocks of a prompt. table: all of its blocks. Those that have a name by that."""
        block_of, names, keys, ids, block_bytes = self._block_of, self._names, chain.keys, chain.ids, chain.block_bytes
        make = tuple.__new__  # a third of the time, and prompts have hundreds of blocks
        entered: list[int] = []
        parent = chain.parent(places.start)
        for place in places:
            key, block_id = keys[place], table[place]
            if key not in block_of and block_id not in names:
                if place and parent not in block_of:
                    break
                block_of[key] = block_id
                begin = place * block_bytes
                names[block_id] = make(BlockName, (key, parent, ids[begin : begin + block_bytes], place))
                entered.append(block_id)
            parent = key
        self._tell(chain, places)
        return entered

    def enter(self, block_id: int, name: BlockName) -> bool:
        """The block, which has an owner, holds this from now on. False: it has no name, as another block has it, or as
        what it builds on is not here. Mutates."""
        if name.key in self._block_of or block_id in self._names:
            return False
        if name.place and name.parent not in self._block_of:
            return False
        self._block_of[name.key] = block_id
        self._names[block_id] = name
        if self._on_piece is not None and name.place % PIECE_BLOCKS == PIECE_BLOCKS - 1:
            self._on_piece(name.key)
        return True

    def _tell(self, chain: PromptChain, places: range) -> None:
        """Of the pieces of a prompt that end at these places and are here."""
        if self._on_piece is None:
            return
        first = places.start + (PIECE_BLOCKS - 1 - places.start) % PIECE_BLOCKS
        for place in range(first, places.stop, PIECE_BLOCKS):
            if chain.keys[place] in self._block_of:
                self._on_piece(chain.keys[place])

    # -- what stays, what goes ---------------------------------------------------------------------

    def keep(self, block_ids: Iterable[int]) -> list[int]:
        """Nobody owns these blocks any more (a sequence's first ones first); those that are not kept. Mutates."""
        kept: list[int] = []
        heads: list[BlockName] = []  # what they build on is not the block before in the list
        not_kept: list[int] = []
        before = b""
        for block_id in block_ids:
            name = self._names.get(block_id)
            if name is None:
                not_kept.append(block_id)
                continue
            if name.parent != before:
                heads.append(name)
            kept.append(block_id)
            before = name.key
        self._idle.update(dict.fromkeys(reversed(kept)))
        if self._unsaved is not None:
            self._unsaved.update(dict.fromkeys(reversed(kept)))
        for name in reversed(heads):
            self._refresh_ancestors(name)
        return not_kept

    def _refresh_ancestors(self, name: BlockName) -> None:
        """What an idle block builds on goes behind it."""
        while name.place and (block_id := self._block_of.get(name.parent)) in self._idle:
            assert block_id is not None
            self._idle.move_to_end(block_id)
            if self._unsaved is not None and block_id in self._unsaved:
                self._unsaved.move_to_end(block_id)
            name = self._names[block_id]

    def evict(self, num_blocks: int) -> list[int]:
        """Idle blocks that are free from now on, the least recently used, at most num_blocks. Mutates."""
        evicted = []
        for _ in range(min(num_blocks, len(self._idle))):
            block_id, _ = self._idle.popitem(last=False)
            self._forget(block_id)
            evicted.append(block_id)
        self.num_evicted += len(evicted)
        return evicted

    @property
    def num_unsaved(self) -> int:
        """Idle blocks that `next_unsaved` will give."""
        return 0 if self._unsaved is None else len(self._unsaved)

    def next_unsaved(self) -> tuple[int, BlockName]:
        """The idle block that goes next, of those that nobody was given yet, to be copied to host memory. There must be
        one. Mutates."""
        assert self._unsaved is not None
        block_id, _ = self._unsaved.popitem(last=False)
        return block_id, self._names[block_id]

    def clear(self) -> list[int]:
        """No block has a name any more; those that were idle, which are free. Mutates."""
        idle = list(self._idle)
        self._idle.clear()
        if self._unsaved is not None:
            self._unsaved.clear()
        self._names.clear()
        self._block_of.clear()
        self.generation += 1
        return idle

    def keys_from(self, block_ids: Iterable[int], elsewhere: Iterable[BlockName] = ()) -> set[bytes]:
        """Keys of these blocks, and of all that was computed from what is in them, here and elsewhere. O(blocks)."""
        keys = {self._names[block_id].key for block_id in block_ids if block_id in self._names}
        for name in sorted([*self._names.values(), *elsewhere], key=lambda name: name.place):
            if name.place and name.parent in keys:
                keys.add(name.key)
        return keys

    def forget(self, block_ids: Iterable[int], elsewhere: Iterable[BlockName] = ()) -> list[int]:
        """These blocks, and all that was computed from what is in them, have no name any more; those of them that were
        idle, which are free. elsewhere: what else builds on what. Mutates. O(blocks)."""
        keys = self.keys_from(block_ids, elsewhere)
        doomed = [block_id for block_id, name in self._names.items() if name.key in keys]
        for block_id in doomed:
            self._forget(block_id)
        self.generation += 1
        return [block_id for block_id in doomed if self._idle.pop(block_id, 0) is None]

    def _forget(self, block_id: int) -> None:
        del self._block_of[self._names.pop(block_id).key]
        if self._unsaved is not None:
            self._unsaved.pop(block_id, None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all views agree and no block would go before what builds on it. O(blocks)."""
        if self._block_of != {name.key: block_id for block_id, name in self._names.items()}:
            raise AssertionError("blocks by key disagree with their names")
        if not self._idle.keys() <= self._names.keys():
            raise AssertionError("an idle block has no name")
        if self._unsaved is not None and not self._unsaved.keys() <= self._idle.keys():
            raise AssertionError("a block that is to be copied has an owner or no name")
        rank = {block_id: number for number, block_id in enumerate(self._idle)}
        for block_id, number in rank.items():
            name = self._names[block_id]
            before = self._block_of.get(name.parent) if name.place else None
            if before is not None and rank.get(before, number) < number:
                raise AssertionError(f"block {block_id} would go behind {before}, on which it builds")
