"""What this router knows of the replicas: who there is, their last reported load, and what it sent them itself."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.policies.routing_policy import DecodeCandidate, PrefillCandidate
from cluster.routing.pair_table import PairTable
from cluster.routing.replica_registry import ReplicaTable
from replicas.messages import PROMPT_SHARE_S, EngineLoad, Frame, TransferPeer


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a replica said of its load, and when."""

    load: EngineLoad
    at_s: float


class PoolView:
    """Loads of decode are half a second old at worst (an idle engine sends a frame that often), less our own unheard
    work. Prefill tells its load with each reply and when it is asked; in between it works off what waits there.

    clock: monotonic seconds. pairs: what is known of a decode and a prefill replica together.

    Prompt tokens are always those that are to be computed: without what is expected to be in a replica's cache.
    """

    def __init__(
        self,
        decodes: Callable[[], ReplicaTable],
        prefills: Callable[[], ReplicaTable],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decodes = decodes
        self._prefills = prefills
        self._clock = clock
        self.pairs = PairTable(clock)
        self._decode_table: ReplicaTable = {}
        self._prefill_table: ReplicaTable = {}
        self._heard: dict[str, _Heard] = {}
        # Of decode, until one of the figures that it is made of changes: of a thousand few do between two requests.
        self._candidates: dict[str, DecodeCandidate] = {}
        self._agent_names: dict[str, str] = {}
        self._unheard_blocks: Counter[str] = Counter()  # sent to decode, not yet heard admitted
        self._unheard_tokens: Counter[str] = Counter()  # likewise, of prompts that it computes itself
        self._in_flight: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()  # sent to prefill, not yet answered
        self._newer_tokens: Counter[str] = Counter()  # of these, sent since it last told its load
        self._coming_tokens: Counter[str] = Counter()  # to be sent there as soon as decode has admitted them
        self._least_row_step_s = 0.0  # of all that were ever heard: what a step takes with next to nobody in it
        self.num_waiting = 0  # our requests that are not admitted, and were sent where they had to wait

    def usable(self) -> Collection[str]:
        """The replicas of both pools that may be chosen."""
        return {**self._decodes(), **self._prefills()}

    def decode_candidates(self) -> list[DecodeCandidate]:
        """Mutates: `decode_peer` finds those of this moment, whoever leaves meanwhile (tables change on any thread)."""
        known, self._decode_table = self._candidates, {**self._decodes(), **able(self._prefills())}
        return [known.get(name) or self._decode_candidate(name, of) for name, of in self._decode_table.items()]

    def prefill_candidates(self) -> list[PrefillCandidate]:
        """Mutates: as decode_candidates, for `prefill_peer`."""
        self._prefill_table = {**self._prefills(), **able(self._decodes())}
        return [self._prefill_candidate(name, metadata) for name, metadata in self._prefill_table.items()]

    @property
    def unheard_blocks(self) -> int:
        """What our requests will use on decode that were sent there and not yet heard admitted."""
        return sum(self._unheard_blocks.values())

    @property
    def sent_prompt_tokens(self) -> int:
        """Prompt tokens that we sent to prefill and that are not answered."""
        return sum(self._prompt_tokens.values())

    def decode_loads(self) -> list[EngineLoad]:
        """What the decode replicas that there are said last; of those that have said something."""
        return [self._heard[name].load for name in self._decodes() if name in self._heard]

    @property
    def promised(self) -> float | None:
        """Of decode's memory the part that is promised, as its replicas said last; None: none has said anything."""
        loads = self.decode_loads()
        total = sum(load.total_blocks for load in loads)
        return (total - sum(load.free_blocks for load in loads)) / total if total else None

    def prefill_loads(self) -> list[EngineLoad]:
        """As decode_loads, of prefill."""
        return [self._heard[name].load for name in self._prefills() if name in self._heard]

    def loads(self) -> dict[str, EngineLoad]:
        """By replica id, what each said last."""
        return {name: heard.load for name, heard in self._heard.items()}

    def decode_metadata(self, replica_id: str) -> Mapping[str, Any]:
        """As decode_peer: all that it has published."""
        return self._decode_table[replica_id]

    def was_of_prefill(self, replica_id: str) -> bool:
        """Of one of the last candidates."""
        metadata = self._prefill_table.get(replica_id) or self._decode_table.get(replica_id) or {}
        return metadata.get("pool") == "prefill"

    def decode_peer(self, replica_id: str) -> TransferPeer:
        """Of one of the last candidates. It may have left since: then calls to it say so."""
        return self.peer(replica_id, self._decode_table[replica_id])

    def prefill_peer(self, replica_id: str) -> TransferPeer:
        """Of one of the last candidates. It may have left since: then calls to it say so."""
        return self.peer(replica_id, self._prefill_table[replica_id])

    def heard(self, frame: Frame) -> None:
        self.heard_load(frame.replica_id, frame.load)

    def heard_load(self, replica_id: str, load: EngineLoad) -> None:
        """It replied, or was asked."""
        self._heard[replica_id] = _Heard(load, self._clock())
        if load.row_step_s:
            self._least_row_step_s = min(load.row_step_s, self._least_row_step_s or load.row_step_s)
        self._candidates.pop(replica_id, None)
        self._newer_tokens.pop(replica_id, None)
        if load.read_source:
            self.pairs.measured(replica_id, [(load.read_source, load.read_bytes_per_s)])

    def sent(self, replica_id: str, blocks: int, must_wait: bool, local_tokens: int = 0) -> None:
        """local_tokens: of a prompt that this decode replica is to compute itself."""
        self._candidates.pop(replica_id, None)
        self._in_flight[replica_id] += 1
        self._unheard_blocks[replica_id] += blocks
        self._unheard_tokens[replica_id] += local_tokens
        self.num_waiting += must_wait

    def admitted(self, replica_id: str, blocks: int, must_wait: bool, local_tokens: int = 0) -> None:
        """No longer unheard: the replica's own figures cover it (or it is over). Once for each `sent`."""
        self._candidates.pop(replica_id, None)
        self._unheard_blocks[replica_id] -= blocks
        self._unheard_tokens[replica_id] -= local_tokens
        self.num_waiting -= must_wait
        assert self._unheard_blocks[replica_id] >= 0, "admitted twice"
        assert self._unheard_tokens[replica_id] >= 0, "admitted twice"
        assert self.num_waiting >= 0, "admitted twice"

    def ended(self, replica_id: str) -> None:
        """Once for each `sent`, after its `admitted`."""
        self._candidates.pop(replica_id, None)
        self._in_flight[replica_id] -= 1
        assert self._in_flight[replica_id] >= 0, "ended twice"
        if not self._in_flight[replica_id]:
            assert not self._unheard_blocks[replica_id], "ended before admitted"
            del self._in_flight[replica_id], self._unheard_blocks[replica_id], self._unheard_tokens[replica_id]

    def prompt_coming(self, replica_id: str, num_tokens: int) -> None:
        """A prompt was routed there: those who come until decode has admitted it are not all to follow it."""
        self._coming_tokens[replica_id] += num_tokens

    def prompt_came(self, replica_id: str, num_tokens: int) -> None:
        """It is sent now, or never will be. Once for each `prompt_coming`."""
        self._coming_tokens[replica_id] -= num_tokens
        assert self._coming_tokens[replica_id] >= 0, "came twice"
        if not self._coming_tokens[replica_id]:
            del self._coming_tokens[replica_id]

    def prompt_sent(self, replica_id: str, num_tokens: int) -> None:
        self._prompt_tokens[replica_id] += num_tokens
        self._newer_tokens[replica_id] += num_tokens

    def prompt_answered(self, replica_id: str, num_tokens: int) -> None:
        self._prompt_tokens[replica_id] -= num_tokens
        assert self._prompt_tokens[replica_id] >= 0, "answered twice"
        if not self._prompt_tokens[replica_id]:
            del self._prompt_tokens[replica_id]
            self._newer_tokens.pop(replica_id, None)

    def forget(self, replica_id: str) -> str | None:
        """The replica has died. Returns the name of its transfer agent, if it was ever used. Mutates."""
        self._heard.pop(replica_id, None)
        self._candidates.pop(replica_id, None)
        return self._agent_names.pop(replica_id, None)

    def left(self, present: Collection[str]) -> None:
        """These replicas there are now, in both pools: of others nothing is kept, once nothing of ours is open there.
        Mutates."""
        open_here = (self._in_flight, self._prompt_tokens, self._coming_tokens)
        for known in (self._heard, self._candidates, self._agent_names):
            for name in [name for name in known if name not in present and not any(name in of for of in open_here)]:
                del known[name]
        self.pairs.left(present)

    def peer(self, replica_id: str, metadata: Mapping[str, Any]) -> TransferPeer:
        """Of one that has published this. Mutates: should it die, others are told."""
        peer = TransferPeer.from_metadata(metadata["peer"])
        self._agent_names[replica_id] = peer.agent_name
        return peer

    def _decode_candidate(self, replica_id: str, metadata: Mapping[str, Any]) -> DecodeCandidate:
        """Remembers it, unless what prompts take of its time counts, which changes all the time. Mutates."""
        total_blocks, node_id = metadata["num_blocks"], metadata.get("node_id", "")
        unheard, num_in_flight = self._unheard_blocks[replica_id], self._in_flight[replica_id]
        local_tokens = self._unheard_tokens[replica_id]
        step_tokens, block_bytes = metadata.get("step_tokens", 0), metadata["peer"]["block_bytes"]
        max_rows = metadata.get("max_sequences", 0)
        may_also = metadata.get("may_also", False)
        if may_also:
            local_tokens += self._newer_tokens[replica_id] + self._coming_tokens[replica_id]
        heard = self._heard.get(replica_id)
        if heard is None:
            free_blocks = total_blocks - unheard
            candidate = DecodeCandidate(
                replica_id,
                total_blocks,
                free_blocks,
                num_in_flight,
                node_id=node_id,
                fingerprint=_fingerprint(metadata),
                num_rows=num_in_flight,
                queued_tokens=local_tokens,
                step_tokens=step_tokens,
                block_bytes=block_bytes,
                max_rows=max_rows,
                is_away=may_also and replica_id not in self._decodes(),
            )
        else:
            candidate = DecodeCandidate(
                replica_id=replica_id,
                total_blocks=total_blocks,
                free_blocks=heard.load.free_blocks - unheard,
                num_in_flight=num_in_flight,
                num_queued=heard.load.num_queued,
                later_free_blocks=tuple(free - unheard for free in heard.load.later_free_blocks),
                expected_tokens=heard.load.expected_tokens,
                step_s=heard.load.step_s,
                node_id=node_id,
                fingerprint=_fingerprint(metadata),
                num_rows=max(heard.load.num_running, num_in_flight),
                queued_tokens=heard.load.queued_prompt_tokens + local_tokens,
                tokens_per_s=heard.load.prefill_tokens_per_s,
                step_tokens=step_tokens,
                block_bytes=block_bytes,
                max_rows=max_rows,
                row_step_s=heard.load.row_step_s or self._least_row_step_s,
                least_row_step_s=self._least_row_step_s,
                prompt_share=self._share_now(heard),
                is_away=may_also and replica_id not in self._decodes(),
            )
        if not may_also:
            self._candidates[replica_id] = candidate
        return candidate

    def _prefill_candidate(self, replica_id: str, metadata: Mapping[str, Any]) -> PrefillCandidate:
        total_blocks, node_id = metadata["num_blocks"], metadata.get("node_id", "")
        ours, coming = self._prompt_tokens[replica_id], self._coming_tokens[replica_id]
        may_also = metadata.get("may_also", False)
        if may_also:
            coming += self._unheard_tokens[replica_id]  # of its own requests
        fingerprint, is_away = _fingerprint(metadata), may_also and replica_id not in self._prefills()
        heard = self._heard.get(replica_id)
        if heard is None:
            return PrefillCandidate(replica_id, total_blocks, ours + coming, 0.0, node_id, fingerprint, is_away=is_away)
        load = heard.load
        rate = load.prefill_tokens_per_s
        done = int(rate * (self._clock() - heard.at_s))
        # Others send there too. What it said covers ours but for those that have gone out since.
        queued = max(load.queued_prompt_tokens + self._newer_tokens[replica_id] - done, ours) + coming
        candidate = PrefillCandidate(replica_id, total_blocks, queued, rate, node_id, fingerprint)
        if not may_also:
            return candidate
        num_rows = max(load.num_running, self._in_flight[replica_id])
        share = self._share_now(heard)
        return candidate._replace(
            num_rows=num_rows,
            row_step_s=load.row_step_s or self._least_row_step_s,
            least_row_step_s=self._least_row_step_s,
            prompt_share=share,
            is_away=is_away,
        )

    def _share_now(self, heard: _Heard) -> float:
        """What it said of the time that prompts have had, which is longer ago by now."""
        return heard.load.prompt_share * math.exp(-(self._clock() - heard.at_s) / PROMPT_SHARE_S)


def able(table: ReplicaTable) -> ReplicaTable:
    """Those of another pool that may do the work of this one too."""
    return {name: metadata for name, metadata in table.items() if metadata.get("may_also", False)}


def _fingerprint(metadata: Mapping[str, Any]) -> str:
    fingerprint: str = metadata["peer"]["fingerprint"]
    return fingerprint
