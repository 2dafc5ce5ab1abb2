"""The prefix cache of a scheduler, held against what lies in the pool and against a recount of who holds what."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from scheduler.prefix_cache import BlockName
from scheduler.prefix_hash import chain_start
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.paged_model import PagedRunner, cell

SALTS = (b"", b"a" * 16)


class _Noted(dict[int, BlockName]):
    """Tells of each name that is given."""

    def __init__(self, note: Callable[[BlockName], None]) -> None:
        super().__init__()
        self._note = note

    def __setitem__(self, block_id: int, name: BlockName) -> None:
        self._note(name)
        super().__setitem__(block_id, name)


class BruteCache:
    """num_found, num_shared: blocks that were found, and of these those that somebody else held, or found too."""

    def __init__(self, scheduler: Scheduler, runner: PagedRunner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._salt_of: dict[bytes, bytes] = {}  # by key, as the start of its chain says
        fingerprint = "" if scheduler.prefixes is None else scheduler.prefixes._options.fingerprint
        self._starts = {chain_start(fingerprint, salt): salt for salt in SALTS}
        self.num_found = self.num_shared = 0
        self.damaged: set[int] = set()  # host blocks that may hold anything, until they are written again
        if scheduler.prefixes is not None:
            scheduler.prefixes.cache._names = _Noted(self._note)

    def _note(self, name: BlockName) -> None:
        self._salt_of[name.key] = self._salt_of[name.parent] if name.place else self._starts[name.parent]

    @property
    def num_named(self) -> int:
        prefixes = self._scheduler.prefixes
        return 0 if prefixes is None else len(prefixes.cache)

    def idle(self) -> tuple[int, ...]:
        prefixes = self._scheduler.prefixes
        return () if prefixes is None else prefixes.cache.idle()

    def has_name(self, block_id: int) -> bool:
        prefixes = self._scheduler.prefixes
        return prefixes is not None and prefixes.cache.has_name(block_id)

    def check_found(self, request: Request) -> None:
        """Of one that was just admitted: what it was given is the beginning of its prompt, of nobody else's salt."""
        prefixes = self._scheduler.prefixes
        if prefixes is None:
            assert (request.num_cached, request.num_shared) == (0, 0)
            return
        block_size = self._scheduler.limits.block_size
        assert request.num_cached < request.prompt_len, "no token is left to compute"
        assert not request.num_cached % block_size
        assert request.num_cached == 0 or request.spec.use_cache
        for place in range(request.num_cached // block_size):
            block_id = request.sequences[0].block_ids[place]
            ids = request.spec.prompt_ids[place * block_size : (place + 1) * block_size]
            cells = [cell(token_id, position) for position, token_id in enumerate(ids, start=place * block_size)]
            assert self._runner.blocks[block_id] == cells, "what was found is something else"
            salt = self._salt_of[prefixes.cache._names[block_id].key]
            assert salt == request.spec.cache_salt, "what was found is another client's"
            self.num_found += 1
        self.num_shared += request.num_shared

    def check(self) -> None:
        """Every name says what lies in its block, and what several hold is counted once."""
        prefixes = self._scheduler.prefixes
        if prefixes is None:
            return
        for block_id, name in prefixes.cache._names.items():
            assert self._runner.blocks[block_id] == self._cells(name), (
                f"block {block_id} was named before it was written"
            )
            assert name.key == blake2b(name.parent + name.ids, digest_size=16).digest()
        for cached in self._scheduler.host._cached.values():
            if cached.host_id not in self.damaged:
                assert self._runner.host[cached.host_id] == self._cells(cached.name), "it is not what it says"
        self._check_shared(self._holders())

    def _cells(self, name: BlockName) -> list[int]:
        """What lies in a block of this name."""
        start = name.place * self._scheduler.limits.block_size
        return [cell(token_id, position) for position, token_id in enumerate(array("I", name.ids), start=start)]

    def damage(self, rng: random.Random) -> None:
        """Something befalls a cached block in host memory, if there is one."""
        cached = list(self._scheduler.host._cached.values())
        if cached:
            host_id = rng.choice(cached).host_id
            self.damaged.add(host_id)
            self._runner.host[host_id] = [-7] * self._scheduler.limits.block_size

    def _holders(self) -> dict[int, set[str]]:
        """Requests that hold each block."""
        scheduler = self._scheduler
        holders: dict[int, set[str]] = {}
        for request_id, request in scheduler._requests.items():
            held = [block_id for sequence in request.sequences for block_id in sequence.block_ids]
            held += scheduler._transfers.get(request_id, ())
            held += [b for cooling in scheduler.preemption._cooling if cooling.request_id == request_id
                     for b in cooling.device_refs]  # fmt: skip
            for block_id in held:
                holders.setdefault(block_id, set()).add(request_id)
        return holders

    def _check_shared(self, holders: dict[int, set[str]]) -> None:
        scheduler, prefixes = self._scheduler, self._scheduler.prefixes
        assert prefixes is not None
        counted = prefixes.shared._num_holders
        assert all(block_id in counted for block_id, ids in holders.items() if len(ids) > 1), "counted several times"
        assert counted == {block_id: len(holders.get(block_id, ())) for block_id in counted}
        assert scheduler.budget.num_shared == len(counted)
        num_shared = Counter(request_id for block_id in counted for request_id in holders[block_id])
        for request_id, request in scheduler._requests.items():
            if not any(request_id in queue for queue in scheduler._queues):
                assert request.num_shared == num_shared[request_id], request_id
