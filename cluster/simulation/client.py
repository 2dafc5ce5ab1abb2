"""A simulated request as its client sees it, and one attempt at it as the router and the engines see it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.policies.routing_policy import Route, RouteKind
from cluster.routing.prompt_forecast import SentPrompt
from scheduler.generation_spec import GenerationSpec
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams

# Simulated engines sample this token last, and the other one before.
STOP_TOKEN, OTHER_TOKEN = 1, 0
_STOPS = frozenset({STOP_TOKEN})
_GREEDY = SamplingParams(temperature=0.0)


class ClientStatus(StrEnum):
    WAITING = "waiting"  # not over yet
    FINISHED = "finished"
    QUEUE_FULL = "queue_full"  # 429 at once
    QUEUE_TIMEOUT = "queue_timeout"  # 429 after ingress.queue_timeout_s
    TIMEOUT = "timeout"  # transfer.handoff_timeout_s or ingress.request_timeout_s
    NEVER_FITS = "never_fits"  # 400


# Below are the tokens of outputs; above, those of prompts that share nothing with any other.
_FIRST_HASHED, _FIRST_OWN = 2, 1 << 31


@dataclass(frozen=True, slots=True)
class Job:
    """What one client asks for. output_len: where its answer stops; max_tokens: what it asked for, at least that.

    acceptance: how often the first of the tokens that are drafted holds, and one behind another that did.
    hash_ids: of its prompt's blocks of block_tokens: two prompts begin alike as far as theirs agree. Without any it is
    like no other.
    """

    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    max_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 1
    acceptance: tuple[float, float] = (0.0, 0.0)

    def prompt_ids(self) -> tuple[int, ...]:
        """Made anew each time: what a trace has in all does not fit into memory."""
        if not self.hash_ids:
            return (_FIRST_OWN + self.index,) * self.prompt_len
        return prompt_ids_of(self.hash_ids, self.block_tokens, self.prompt_len)


def prompt_ids_of(hash_ids: Sequence[int], block_tokens: int, prompt_len: int) -> tuple[int, ...]:
    """Token ids that agree where hash_ids do: each block is one token, over and over."""
    ids: list[int] = []
    for hash_id in hash_ids:
        ids += (_FIRST_HASHED + hash_id,) * block_tokens
    # A last block that is longer than the others, by rounding.
    ids += ids[-1:] * (prompt_len - len(ids))
    return tuple(ids[:prompt_len])


@dataclass(slots=True)
class Client:
    """Times are those at the client. first_s, last_s: of its tokens."""

    job: Job
    status: ClientStatus = ClientStatus.WAITING
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_attempts: int = 0
    attempt: Attempt | None = field(default=None, repr=False)  # the last one

    @property
    def is_over(self) -> bool:
        return self.status is not ClientStatus.WAITING

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.job.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None with a single token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def e2el_s(self) -> float:
        return self.last_s - self.job.arrival_s


@dataclass(slots=True)
class Attempt:
    """One try: what is still to be generated, on one route. last_token_s: when its last token left an engine."""

    client: Client
    route: Route
    request_id: str
    prompt_len: int  # tokens generated before count as prompt
    output_len: int
    max_tokens: int
    is_admitted: bool = False
    is_prefilling: bool = False  # the router has sent it to prefill and not heard from there
    answered_s: float = 0.0  # when it heard from there
    is_coming: bool = True  # its KV, by the pair's way, if that is its route
    has_moved: bool = False  # decode has answered with a token
    num_offered_blocks: int = 0  # of its KV, to decode
    is_closed: bool = False
    num_tokens: int = 0  # that have left engines
    last_token_s: float = 0.0
    prompt: SentPrompt = field(default_factory=SentPrompt, repr=False)  # until it is answered
    # Tokens of its prompt that were in the caches of its engines.
    prefill_found: int = 0
    decode_found: int = 0
    _rng: random.Random | None = field(default=None, repr=False)

    @property
    def computed_tokens(self) -> int:
        """Of its prompt, as its router expects."""
        return self.prompt_len - self.route.cached_tokens

    @property
    def read_tokens(self) -> int:
        """Likewise, of its prompt's KV."""
        return self.prompt_len - self.route.kept_tokens

    @property
    def is_local(self) -> bool:
        return self.route.kind is not RouteKind.REMOTE

    @property
    def local_tokens(self) -> int:
        """Of its prompt, that decode computes itself, as its router expects."""
        return self.computed_tokens if self.is_local else 0

    def request(self, deadline_s: float, *, local_prefill: bool, hands_over: bool = False) -> Request:
        """As one engine's scheduler keeps it."""
        spec = spec_of(self.client.job, self.prompt_len, self.max_tokens)
        return Request(
            self.request_id, spec, deadline_s, local_prefill, hands_over, has_begun=self.client.num_tokens > 0
        )

    def num_held(self, num_drafts: int) -> int:
        """Of so many drafts. Mutates: each time by chance, as the job's index has it."""
        if self._rng is None:
            self._rng = random.Random(f"drafts {self.request_id}")
        count, (first, further) = 0, self.client.job.acceptance
        while count < num_drafts and self._rng.random() < (further if count else first):
            count += 1
        return count

    def token(self, num_known: int) -> int:
        """What is sampled when so many are known."""
        return STOP_TOKEN if num_known + 1 >= self.output_len else OTHER_TOKEN


def spec_of(job: Job, prompt_len: int, max_tokens: int) -> GenerationSpec:
    """What an attempt asks engines for: the job's prompt, and behind it what has been generated before."""
    ids = job.prompt_ids()
    ids += (OTHER_TOKEN,) * (prompt_len - len(ids))
    return GenerationSpec(ids, (0,), max_tokens, _STOPS, _GREEDY)
