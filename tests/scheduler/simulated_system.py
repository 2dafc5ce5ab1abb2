"""Clients, a router and KV transfers around a prefill and a decode engine, all pretended and seeded.

Requests arrive at random, are cancelled in any state, run out of time, lose their KV on the way. Reads copy
the source's pool cells at the moment they run and write into the reader's, also after the reader has given up.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf

from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams, BeamSearch
from scheduler.capabilities import DECODE, PREFILL
from scheduler.constant_drafts import ConstantDrafts
from scheduler.draft_planner import Speculation
from scheduler.generated_token import Token
from scheduler.generation_spec import GenerationSpec
from scheduler.outcome import NeverFits, PromptDone, PromptPart
from scheduler.pool_limits import PoolLimits
from scheduler.prefix_book import PrefixOptions
from scheduler.request import Request, RequestState
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.speculation import RowSpeculation, SpeculationState
from tests.scheduler.brute_cache import SALTS
from tests.scheduler.paged_model import (
    BEAM_VOCAB_SIZE,
    VOCAB_SIZE,
    OracleDrafts,
    reference_search,
    reference_tokens,
    until_stop,
)
from tests.scheduler.short_requests import ALL_ABLE
from tests.scheduler.simulated_engine import FaultRates, SimulatedEngine

_LONGEST_PROMPT = 30
_MOST_TOKENS = 14


@dataclass(frozen=True, slots=True)
class Workload:
    """local_share: part of the requests that decode prefills itself. Rates are per request, of faults per step."""

    seed: int
    lag: int
    num_requests: int = 200
    local_share: float = 0.5
    cancel_rate: float = 0.2
    short_deadline_rate: float = 0.1
    lost_read_rate: float = 0.05
    faults: FaultRates = field(default_factory=FaultRates)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    host_share: float = 0.0  # size of the host's memory for preempted requests, relative to the pool's
    scarcity: float = 1.0  # divides decode's blocks
    beam_rate: float = 0.0  # part of the requests that are beam searches
    all_able: bool = False  # both engines can do everything
    known_rate: float = 0.0  # part of the requests whose tokens must be known before the next row is planned
    prefill_step_tokens: int | None = None  # None: any number
    chunk_multiple: int = 1  # where prompts are best cut
    two_lanes: bool = False  # each computes prompts beside its rows
    damage_rate: float = 0.0  # chance per tick and engine that something befalls a cached block in host memory
    prefixes: PrefixOptions | None = None  # with a prefix cache; prompts then often begin as others, or go on from them
    has_replays: bool = False  # some requests have begun elsewhere, and some are suspects
    max_drafts: int = 0  # of a row
    right_drafts: float = 0.7  # chance of each


class Status(Enum):
    OPEN = auto()
    FINISHED = auto()
    ENDED = auto()  # cancelled, timed out, failed
    REFUSED = auto()  # can never fit


@dataclass(slots=True)
class Client:
    """One request as its client sees it."""

    request: Request
    remote: bool
    status: Status = Status.OPEN
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Transfer:
    """One handoff. offered: the source's blocks so far. unread: pairs (source block, reader block) that are ordered and
    still to copy, in random order."""

    request_id: str
    wait: int  # ticks until the next thing happens
    offered: list[int] = field(default_factory=list)
    done: PromptDone | None = None  # when no part follows
    given: tuple[int, ...] = ()  # the reader's blocks
    num_ordered: int = 0
    unread: list[tuple[int, int]] | None = None  # None: not begun
    released: bool = False  # the reader's scheduler knows that the read has ended
    lost: bool = False


@dataclass(frozen=True)
class RandomDrafts(ConstantDrafts):
    """Some steps none, else any numbers."""

    rng: random.Random

    def choose(
        self, rows: Sequence[RowSpeculation], num_context_tokens: int, most_tokens: int | None = None
    ) -> tuple[int, ...]:
        if self.rng.random() < 0.2:
            return (0,) * len(rows)
        return tuple([self.rng.choice([0, row.most, self.rng.randint(0, row.most)]) for row in rows])

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        assert num_planned >= num_drafted >= num_accepted >= 0


class SimulatedSystem:
    """`run` plays the whole workload and checks it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.rng = rng = random.Random(workload.seed)
        block_size = rng.choice([1, 2, 3, 4])
        max_sequences = rng.randint(3, 8)
        decode_blocks = int(rng.randint(45, 120) / workload.scarcity) // block_size + 4
        prefill_blocks = rng.randint(25, 60) // block_size + 2
        cut = {"chunk_multiple": workload.chunk_multiple}
        decode = PoolLimits(decode_blocks, block_size, max_sequences, max_sequences + rng.randint(0, 16), **cut)
        step_tokens = workload.prefill_step_tokens or rng.randint(1, 16)
        prefill = PoolLimits(prefill_blocks, block_size, rng.randint(1, 4), step_tokens, **cut)
        max_blocks = -(-(_LONGEST_PROMPT + _MOST_TOKENS) // block_size)
        self.now_s = 0.0
        self.clients: dict[str, Client] = {}
        self.num_handed_over = 0
        self.num_kept = 0  # blocks that were not read, as they were there
        self.num_early = 0  # blocks that were read before their prompt was computed
        self.num_ended_between = 0  # transfers whose source let go of them between parts
        self._open: dict[str, float] = {}  # -> when its client loses patience
        self._transfers: dict[str, Transfer] = {}
        speculation = None
        if workload.max_drafts:
            drafts, most = RandomDrafts(workload.max_drafts, rng), workload.max_drafts
            speculation = Speculation(drafts, most, can_draft=lambda sampling: sampling.seed % 8 != 0)
        scheduler = Scheduler(
            decode,
            ALL_ABLE if workload.all_able else DECODE,
            workload.admission,
            workload.lag,
            num_host_blocks=int(decode_blocks * workload.host_share),
            has_two_lanes=workload.two_lanes,
            prefixes=workload.prefixes,
            speculation=speculation,
        )
        num_kept = int(prefill_blocks * workload.host_share) if workload.prefixes else 0
        source = Scheduler(prefill, PREFILL, None, workload.lag, num_kept, prefixes=workload.prefixes)
        if workload.all_able:
            prefill = replace(prefill, max_step_tokens=prefill.max_step_tokens + prefill.max_sequences)
            two_lanes = workload.two_lanes
            source = Scheduler(
                prefill, ALL_ABLE, workload.admission, workload.lag, num_kept, two_lanes, workload.prefixes
            )
        oracle = OracleDrafts(workload.seed, workload.right_drafts) if workload.max_drafts else None
        self.decode = SimulatedEngine(
            scheduler, max_blocks, rng, workload.faults, self._on_decode, self._end_both, oracle
        )
        self.prefill = SimulatedEngine(source, max_blocks, rng, workload.faults, self._on_prefill, self._end_both)

    def run(self) -> None:
        rng = self.rng
        actions = [self._move_transfers, self._iterate_decode, self._iterate_prefill, self._run_devices]
        most_open = 10
        while len(self.clients) < self.workload.num_requests or self._open or self._transfers:
            if rng.random() < 0.05:
                most_open = rng.choice([1, 4, 10, 20])  # quiet and busy times
            while len(self.clients) < self.workload.num_requests and len(self._open) < most_open:
                self._arrive()
            self._lose_patience()
            rng.shuffle(actions)
            for action in actions:
                if rng.random() < 0.85:
                    action()
            for engine in (self.decode, self.prefill) if self.workload.damage_rate else ():
                if rng.random() < self.workload.damage_rate:
                    engine.cache.damage(rng)
            self.now_s += rng.random()
            assert self.now_s < 10.0 * self.workload.num_requests, "requests hang"
        for _ in range(30 if self.workload.two_lanes else 3):  # steps in flight behind the last stop
            self._iterate_decode()
            self._iterate_prefill()
        self._check_end()

    # -- clients -----------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        request_id = f"r{len(self.clients)}"
        num_choices = rng.choice([1, 1, 1, 2, 3, 4])
        max_tokens = rng.choice([1, 2, rng.randint(1, _MOST_TOKENS), rng.randint(1, _MOST_TOKENS)])
        prompt_len = rng.randint(1, rng.choice([4, 12, _LONGEST_PROMPT]))
        prompt_ids = tuple(rng.randrange(1000) for _ in range(prompt_len))
        if self.workload.prefixes is not None:
            prompt_ids = self._known_prefix(prompt_ids)
        choices = tuple(sorted(rng.sample(range(6), num_choices)))
        seed = rng.randrange(1 << 30)
        stops: set[int] = {VOCAB_SIZE + 1}
        if rng.random() < 0.6:
            tokens = reference_tokens(prompt_ids, rng.choice(choices), seed, max_tokens)
            stops.add(rng.choice(tokens))
        if rng.random() < 0.1:  # every choice ends with its first token
            stops.update(reference_tokens(prompt_ids, choice, seed, 1)[0] for choice in choices)
        beam = None
        if self.workload.beam_rate and rng.random() < self.workload.beam_rate:
            num_choices = rng.choice([1, 2, 3, 4])
            choices = tuple(range(num_choices))
            stops = set(rng.sample(range(BEAM_VOCAB_SIZE), rng.choice([0, 1, 4])))
            beam = BeamParams(num_choices, rng.choice([0.0, 1.0, 2.0]), rng.choice([True, False, "never"]))
        urgent = rng.random() < self.workload.short_deadline_rate
        deadline_s = self.now_s + (rng.uniform(0.0, 20.0) if urgent else 1e9)
        is_local = rng.random() < self.workload.local_share
        spec = GenerationSpec(
            prompt_ids=prompt_ids,
            choices=choices,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stops),
            sampling=SamplingParams(seed=seed, num_logprobs=None if beam is None else beam.num_candidates(len(stops))),
            priority=(0, 1, 0, -1, 0)[len(self.clients) % 5],
            client=("", "a", "a", "b")[len(self.clients) % 4],
            beam=beam,
            num_returned=rng.randint(1, num_choices) if beam is not None else 0,
            cache_salt=rng.choice(SALTS) if self.workload.prefixes is not None else b"",
            use_cache=self.workload.prefixes is None or rng.random() < 0.95,
        )
        needs_known = self.workload.known_rate > 0.0 and rng.random() < self.workload.known_rate
        request = Request(request_id, spec, deadline_s, local_prefill=is_local, needs_known_tokens=needs_known)
        if self.workload.has_replays:
            request.has_begun = rng.random() < 0.3
            request.is_suspect = is_local and rng.random() < 0.3
        client = self.clients[request_id] = Client(request, remote=not request.local_prefill)
        scheduler = self.decode.scheduler
        fits = scheduler.blocks_needed(request) <= scheduler.limits.num_blocks
        fits = fits and num_choices <= scheduler.limits.max_sequences - scheduler._reserved_from(request)[1]
        try:
            self.decode.submit(request, self.now_s)
            assert fits
            patient = rng.random() >= self.workload.cancel_rate
            self._open[request_id] = inf if patient else self.now_s + rng.uniform(0.0, 25.0)
        except NeverFits:
            assert not fits
            client.status = Status.REFUSED

    def _known_prefix(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Often it begins as another one, or goes on where an answer has ended."""
        rng, others = self.rng, list(self.clients.values())[-40:]
        if not others or rng.random() < 0.2:
            return prompt_ids
        other = rng.choice(others)
        before = list(other.request.spec.prompt_ids)
        if other.tokens and rng.random() < 0.5:
            before += rng.choice(list(other.tokens.values()))
        before = before[: rng.choice([_LONGEST_PROMPT, rng.randint(1, _LONGEST_PROMPT)])]
        return (*before, *prompt_ids)[: max(len(before), min(_LONGEST_PROMPT, len(before) + rng.choice([0, 1, 8])))]

    def _lose_patience(self) -> None:
        for request_id in [request_id for request_id, until_s in self._open.items() if until_s <= self.now_s]:
            self._end_both(request_id)

    def _end_both(self, request_id: str) -> None:
        """The router gives up, or one engine did: whatever is left on either side ends, each in its own way."""
        if self._open.pop(request_id, None) is not None:
            self.clients[request_id].status = Status.ENDED
        self.decode.end(request_id, RequestState.CANCELLED, self.now_s)
        on_prefill = self.prefill.scheduler.get(request_id)
        if on_prefill is None:
            return
        if on_prefill.state is not RequestState.LEASED or self.rng.random() < 0.3:
            self.prefill.end(request_id, RequestState.CANCELLED, self.now_s)
        if self.rng.random() < 0.5:  # the drop reaches the source at once; else when the transfer sees it
            self._end_lease(request_id)

    # -- engines -----------------------------------------------------------------------------------

    def _iterate_decode(self) -> None:
        for request in self.decode.iterate(self.now_s):
            client = self.clients[request.request_id]
            if client.remote and client.status is Status.OPEN:
                self._prefill(request)

    def _prefill(self, request: Request) -> None:
        deadline_s = request.deadline_s + self.rng.uniform(-2.0, 2.0)
        copy = Request(request.request_id, request.spec, deadline_s, hands_over=True, has_begun=request.has_begun)
        try:
            self.prefill.submit(copy, self.now_s)
        except NeverFits:
            self._end_both(request.request_id)

    def _iterate_prefill(self) -> None:
        self.prefill.iterate(self.now_s)

    def _on_prefill(self, event: Token | PromptPart | PromptDone) -> None:
        assert not isinstance(event, Token)
        transfer = self._transfers.get(event.request_id)
        if isinstance(event, PromptDone):
            for token in event.first_tokens:
                self._receive(token)
            if not event.block_ids:
                self.decode.end(event.request_id, RequestState.CANCELLED, self.now_s)
                return
        if transfer is None:
            transfer = Transfer(event.request_id, self.rng.randint(0, 4))
            self._transfers[event.request_id] = transfer
        if isinstance(event, PromptPart):
            transfer.offered += event.block_ids
        else:
            assert event.block_ids[: len(transfer.offered)] == tuple(transfer.offered), "the parts are others"
            transfer.offered, transfer.done = list(event.block_ids), event

    def _on_decode(self, event: Token | PromptPart | PromptDone) -> None:
        assert isinstance(event, Token)
        self._receive(event)

    def _run_devices(self) -> None:
        self.decode.run_some()
        self.prefill.run_some()

    def _receive(self, event: Token) -> None:
        client = self.clients[event.request_id]
        assert client.status is Status.OPEN, "a token of a request that is over"
        tokens = client.tokens.setdefault(event.choice, [])
        assert event.index == len(tokens)
        assert event.choice not in client.reasons, "a token behind the last one"
        tokens.append(event.token_id)
        if event.finish_reason is not None:
            client.reasons[event.choice] = event.finish_reason
            if len(client.reasons) == client.request.spec.num_answers:
                client.status = Status.FINISHED
                del self._open[event.request_id]

    # -- transfers ---------------------------------------------------------------------------------

    def _move_transfers(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.wait -= 1
            if transfer.wait < 0:
                self._advance(transfer)
                self.decode.check()
        if self._transfers:
            self.prefill.check()

    def _advance(self, transfer: Transfer) -> None:
        rng, request_id = self.rng, transfer.request_id
        on_decode = self.decode.scheduler.get(request_id)
        if transfer.unread is None:
            if on_decode is None:
                self._drop(transfer)
                return
            load = self.decode.scheduler.begin_load(request_id, self.now_s)
            self.num_kept += load.num_kept
            transfer.given, transfer.num_ordered, transfer.unread = load.block_ids, load.num_kept, []
            transfer.lost = rng.random() < self.workload.lost_read_rate
        elif transfer.unread:
            for _ in range(rng.randint(1, len(transfer.unread))):
                source, target = transfer.unread.pop()
                self.decode.runner.blocks[target] = list(self.prefill.runner.blocks[source])
                self.num_early += transfer.done is None
            if on_decode is None:  # an orphan: its last writes come late
                self._end_lease(request_id)
                transfer.wait = rng.choice([0, 3, 30])
        elif on_decode is not None and transfer.num_ordered < len(transfer.offered):
            end = len(transfer.offered)
            places = range(transfer.num_ordered, end)
            transfer.unread = [(transfer.offered[place], transfer.given[place]) for place in places]
            rng.shuffle(transfer.unread)
            transfer.num_ordered = end
        elif transfer.done is None:
            if on_decode is None:
                self._drop(transfer)
            elif rng.random() < self.workload.lost_read_rate:  # its lease ends while it waits for the next part
                self.num_ended_between += 1
                self._end_both(request_id)
                self._drop(transfer)
        elif not transfer.released and (on_decode is None or transfer.lost or rng.random() < 0.6):
            self.decode.scheduler.transfer_ended(request_id)
            transfer.released = True
            transfer.wait = rng.randint(0, 2)
        else:
            self._confirm(transfer, transfer.done, on_decode)

    def _confirm(self, transfer: Transfer, done: PromptDone, on_decode: Request | None) -> None:
        """The read is over. It counts if the lease was alive throughout."""
        request_id = transfer.request_id
        on_prefill = self.prefill.scheduler.get(request_id)
        alive = on_prefill is not None and on_prefill.state is RequestState.LEASED
        if on_decode is None or transfer.lost or not alive:
            self._end_both(request_id)
            self._drop(transfer)
            return
        self.num_handed_over += 1
        self._end_lease(request_id)
        if on_decode.search is not None:
            self.decode.scheduler.beams_ready(request_id, done.candidates, self.now_s)
        else:
            self.decode.scheduler.kv_ready(request_id, done.first_tokens, self.now_s)
        self._drop(transfer)

    def _drop(self, transfer: Transfer) -> None:
        self.decode.scheduler.transfer_ended(transfer.request_id)
        self._end_lease(transfer.request_id)
        del self._transfers[transfer.request_id]

    def _end_lease(self, request_id: str) -> None:
        """At the source: a prompt of which only parts were offered ends with it, as nobody would read the rest."""
        on_prefill = self.prefill.scheduler.get(request_id)
        if on_prefill is not None and on_prefill.state is RequestState.PREFILLING:
            self.prefill.end(request_id, RequestState.FAILED, self.now_s)
        for _ in range(self.rng.choice([1, 1, 2])):  # told twice now and then
            self.prefill.scheduler.lease_ended(request_id, self.now_s)

    # -- the end -----------------------------------------------------------------------------------

    def _check_end(self) -> None:
        self.decode.check_at_rest()
        self.prefill.check_at_rest()
        for client in self.clients.values():
            self._check_text(client)
        batch = self.decode.scheduler.batch
        clients = [client for client in self.clients.values() if client.request.search is None]
        num_tokens = sum(len(tokens) for client in clients for tokens in client.tokens.values())
        num_firsts = sum(len(client.tokens) for client in clients)
        assert batch.num_forwarded_tokens == num_tokens - num_firsts + self.decode.num_beam_rows
        num_local_firsts = sum(len(client.tokens) for client in clients if not client.remote)
        num_local_firsts += self.decode.num_beam_prompts
        assert self.decode.num_sampled == batch.num_forwarded_tokens + num_local_firsts + batch.num_surplus_tokens

    def _check_text(self, client: Client) -> None:
        request = client.request
        if request.search is not None:
            self._check_search(client, request.search)
            return
        if client.status is Status.FINISHED:
            assert client.tokens.keys() == set(request.spec.choices)
        for choice, tokens in client.tokens.items():
            spec = request.spec
            whole = reference_tokens(spec.prompt_ids, choice, spec.sampling.seed, spec.max_tokens)
            answer = until_stop(whole, spec.stop_token_ids)
            if choice in client.reasons:
                assert (tuple(tokens), client.reasons[choice]) == (answer.token_ids, answer.finish_reason)
            else:
                assert tuple(tokens) == answer.token_ids[: len(tokens)]

    def _check_search(self, client: Client, begun: BeamSearch) -> None:
        """All of the best texts, or nothing."""
        request = client.request
        if client.status is not Status.FINISHED:
            assert not client.tokens
            return
        first = BeamSearch(begun.params, begun.stop_token_ids, begun.max_tokens)
        spec = request.spec
        best = reference_search(spec.prompt_ids, first, spec.sampling.seed).hypotheses[: spec.num_returned]
        assert {c: tuple(tokens) for c, tokens in client.tokens.items()} == {
            choice: hypothesis.token_ids for choice, hypothesis in enumerate(best)
        }
        assert client.reasons == {choice: hypothesis.finish_reason for choice, hypothesis in enumerate(best)}

    def statuses(self) -> Counter[Status]:
        return Counter(client.status for client in self.clients.values())
