"""Both halves of a handoff in parts, each held against a model by sets and lists, for thousands of seeded histories.

The model knows no phases: after each event it recounts from nothing what the half must say.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from replicas.kv.handoff_actions import (
    Action,
    CheckDigests,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    KvReady,
    LastPartArrived,
    ReadReleased,
    SendNote,
    SourceReleased,
    StartRead,
)
from replicas.kv.handoff_reader import HandoffReader
from replicas.kv.handoff_source import HandoffSource
from replicas.messages import Dispute, Handoff, NoteKind, TransferNote, TransferPeer

TIMING = HandoffTiming(lease_s=9.0, resend_s=0.5, max_resend_s=2.0, remember_s=500.0, quarantine_s=5.0)
SOURCE, READER = "prefill-s1", "decode-r1"
NUM_SEEDS = 400

Said = tuple[object, ...]


def said(actions: list[Action]) -> list[Said]:
    """What the model speaks of: kinds and block ids."""
    words: list[Said] = []
    for action in actions:
        match action:
            case SendNote(message=TransferNote(kind=kind, num_blocks=num_blocks)):
                words.append((str(kind), num_blocks) if kind is NoteKind.RENEW else (str(kind),))
            case SendNote(message=Handoff(first_block=first, block_ids=ids, is_last=is_last)):
                words.append(("part", first, ids, is_last))
            case SendNote(message=Dispute(block_ids=ids)):
                words.append(("dispute", ids))
            case StartRead(local_block_ids=here, remote_block_ids=there, note=note):
                words.append(("read", here, there, str(note.kind)))
            case CheckDigests(local_block_ids=here, digests=digests):
                words.append(("check", here, digests))
            case HandoffArrived() | LastPartArrived() | KvReady() | KvLost() | ReadReleased() | SourceReleased():
                words.append((type(action).__name__,))
            case _:
                raise AssertionError(action)
    return words


def note(kind: NoteKind, num_blocks: int = 0) -> TransferNote:
    return TransferNote(kind, "t", "s1", "r1", "", num_blocks)


class Prompt:
    """Its blocks at both ends, and a digest of each."""

    def __init__(self, rng: random.Random) -> None:
        self.size = rng.randint(1, 7)
        self.there = tuple(rng.sample(range(50), self.size))
        self.here = tuple(rng.sample(range(50), self.size))
        self.num_kept = rng.choice([0, 0, rng.randint(0, self.size)])

    def part(self, first: int, end: int) -> Handoff:
        is_last = end == self.size
        digests = b"".join(self.digest(place) for place in range(first, end))
        return Handoff("t", "s1", "r1", "f", self.there[first:end], 70, digests, (), 9.0, (), first, is_last)

    def digest(self, place: int) -> bytes:
        return f"{self.there[place]:8}".encode()


# -- the reader ------------------------------------------------------------------------------------


@dataclass
class ReaderModel:
    """Places of the prompt's blocks. read: of reads that ended well, or are not needed."""

    prompt: Prompt
    told: set[int] = field(default_factory=set)
    has_memory: bool = False
    read: set[int] = field(default_factory=set)
    reading: set[int] | None = None
    unchecked: list[CheckDigests] = field(default_factory=list)
    is_confirmed: bool = False
    is_over: bool = False
    has_released: bool = False

    @property
    def all(self) -> set[int]:
        return set(range(self.prompt.size))

    @property
    def has_all(self) -> bool:
        """Only the source's word and digests are missing."""
        return self.has_memory and self.told == self.all == self.read and self.reading is None

    def take_part(self, first: int, end: int) -> list[Said]:
        if self.is_over:
            return [("drop",)]
        if self.has_all:
            return [("done",)]
        words: list[Said] = []
        news = set(range(first, end)) - self.told
        if first <= len(self.told) and news:
            was_told = bool(self.told)
            self.told |= news
            if not was_told:
                words.append(("HandoffArrived",))
            elif self.told == self.all:
                words.append(("LastPartArrived",))
        return [("renew", len(self.told)), *words, *self.go_on()]

    def give(self) -> list[Said]:
        if self.is_over:
            return [("ReadReleased",)]
        self.has_memory = True
        self.read = set(range(self.prompt.num_kept))
        return self.go_on()

    def go_on(self) -> list[Said]:
        if not self.has_memory or self.reading is not None or self.has_released:
            return []
        wanted = self.told - self.read
        if wanted:
            self.reading = wanted
            carries = "done" if self.told == self.all else "renew"
            places = sorted(wanted)
            ids = tuple(tuple(of[place] for place in places) for of in (self.prompt.here, self.prompt.there))
            return [("read", *ids, carries)]
        if not self.has_all:
            return []
        self.has_released = True
        first_done: list[Said] = [("done",)] if self.prompt.num_kept == self.prompt.size else []
        return [*first_done, ("ReadReleased",), *self.end_well()]

    def read_ended(self, ok: bool) -> list[Said]:
        assert self.reading is not None
        places, self.reading = sorted(self.reading), None
        if self.is_over:
            self.has_released = True
            return [("ReadReleased",)]
        if not ok:
            self.has_released = True
            return [("ReadReleased",), *self.lose(tells=True)]
        self.read |= set(places)
        ids = tuple(self.prompt.here[place] for place in places)
        digests = b"".join(self.prompt.digest(place) for place in places)
        self.unchecked.append(CheckDigests("t", places[0], ids, digests))
        return [*self.go_on(), ("check", ids, digests)]

    def checked(self, check: CheckDigests, wrong: list[int]) -> list[Said]:
        self.unchecked.remove(check)
        if self.is_over:
            return []
        if wrong:
            ids = tuple(self.prompt.there[check.first_block + place] for place in wrong)
            return [("dispute", ids), *self.lose(tells=True)]
        return self.end_well()

    def confirmed(self) -> list[Said]:
        is_last_read = self.reading is not None and self.read | self.reading == self.told == self.all
        if self.is_over or self.is_confirmed or not (is_last_read or self.has_all):
            return []
        self.is_confirmed = True
        return self.end_well()

    def end_well(self) -> list[Said]:
        if not self.has_all or not self.is_confirmed or self.unchecked:
            return []
        self.is_over = True
        return [("KvReady",)]

    def lose(self, *, tells: bool) -> list[Said]:
        """tells: the source does not know."""
        self.is_over = True
        words: list[Said] = [("drop",)] if tells and not self.is_confirmed else []
        words.append(("KvLost",))
        if self.has_memory and self.reading is None and not self.has_released:
            self.has_released = True
            words.append(("ReadReleased",))
        return words


def run_reader(seed: int) -> Counter[str]:
    """One history: parts as a network gives them, reads, checks and ends in any order."""
    rng = random.Random(seed)
    prompt = Prompt(rng)
    peer = TransferPeer("prefill", "s1", SOURCE, b"", "f", num_blocks=50, block_bytes=64)
    reader, model = HandoffReader("r1", "f", TIMING, require_digests=True), ReaderModel(prompt)
    reader.expect("t", peer, 70, prompt.size, 1000.0, 0.0)
    harm, did, now_s = rng.choice([0.0, 0.05]), Counter[str](), 0.0
    ends = sorted({*(rng.randint(1, prompt.size) for _ in range(3)), prompt.size})
    offered = 0  # of ends
    for _ in range(60):
        now_s += 0.01
        choices = ["part", "part"] + ["offer"] * (offered < len(ends)) + ["read"] * 2 * (model.reading is not None)
        choices += ["check"] * 2 * bool(model.unchecked) + ["confirm"] + ["give"] * 2 * (
            bool(model.told) and not model.has_memory and not model.is_over
        )  # fmt: skip
        what = rng.choice(["cancel", "refuse", "dead"]) if rng.random() < harm else rng.choice(choices)
        did[f"when {what}"] += 1
        expected: list[Said] | None = None
        match what:
            case "offer":
                offered += 1
                continue
            case "part":
                if not offered:
                    continue
                bounds = [0, *ends[:offered]]
                first = rng.choice(bounds[:-1])
                end = rng.choice([bound for bound in bounds if bound > first])
                got = reader.receive_handoff(prompt.part(first, end), SOURCE, now_s)
                expected = model.take_part(first, end)
            case "give":
                got = reader.read_into("t", prompt.here, prompt.num_kept, now_s)
                expected = model.give()
            case "read":
                ok = rng.random() >= harm
                got, expected = reader.read_ended("t", ok, "", now_s), model.read_ended(ok)
            case "check":
                check = rng.choice(model.unchecked)
                places = range(len(check.local_block_ids))
                wrong = sorted(rng.sample(places, rng.randint(1, len(places)))) if rng.random() < harm else []
                got, expected = reader.digests_checked(check, wrong, now_s), model.checked(check, wrong)
            case "confirm":
                got, expected = reader.receive(note(NoteKind.CONFIRM), SOURCE, now_s), model.confirmed()
            case "cancel":
                got = reader.cancel("t", now_s)
                expected = [] if model.is_over else model.lose(tells=True)
            case "refuse":
                got = reader.receive(note(NoteKind.REFUSE), SOURCE, now_s)
                expected = [] if model.is_over or model.is_confirmed else model.lose(tells=False)
            case _:
                got = reader.peer_dead(SOURCE, now_s)
                expected = [] if model.is_over or model.is_confirmed else model.lose(tells=False)
        assert said(got) == expected, what
        assert reader.num_open == (not model.is_over)
        did.update(str(word[0]) for word in said(got))
    return did


@pytest.mark.parametrize("batch", range(4))
def test_a_reader_does_what_the_model_says(batch: int) -> None:
    did: Counter[str] = Counter()
    for seed in range(batch * NUM_SEEDS, (batch + 1) * NUM_SEEDS):
        try:
            did += run_reader(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert did["KvReady"] > NUM_SEEDS // 4
    kinds = ("drop", "done", "renew", "dispute", "read", "check", "LastPartArrived", "KvLost", "ReadReleased")
    for what in (*kinds, "when cancel", "when refuse", "when dead"):
        assert did[what] > 0, did


# -- the source ------------------------------------------------------------------------------------


@dataclass
class SourceModel:
    """num_offered: blocks. renewed_s: when the lease was opened, and each time that it was renewed."""

    prompt: Prompt
    num_offered: int = 0
    heard: list[int] = field(default_factory=lambda: [0])
    renewed_s: list[float] = field(default_factory=list)
    outcome: str = ""  # of what has ended

    def is_alive(self, now_s: float) -> bool:
        return bool(self.renewed_s) and not self.outcome and now_s < min(max(self.renewed_s) + 9.0, 60.0)

    def late(self, now_s: float) -> list[Said]:
        """Whoever looks at it sees that its time is up."""
        if not self.renewed_s or self.outcome or self.is_alive(now_s):
            return []
        self.outcome = "expired"
        return [("refuse",), ("SourceReleased",)]

    def unheard(self) -> Said:
        first, end = max(self.heard), self.num_offered
        return ("part", first, self.prompt.there[first:end], end == self.prompt.size)


def run_source(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    prompt = Prompt(rng)
    source, model, did, now_s = HandoffSource("s1", TIMING), SourceModel(prompt), Counter[str](), 0.0
    for _ in range(60):
        now_s += rng.choice([0.01, 0.3, 0.3, 3.0])
        what = rng.choice(["offer", "offer", "renew", "renew", "tick", "tick", "tick", "done", "end"])
        if what == "end":
            what = rng.choice(["drop", "cancel", "dead", "tick", "tick", "tick"])
        end = min(prompt.size, model.num_offered + rng.randint(1, 3))
        if what == "offer" and model.num_offered == prompt.size:
            what = "tick"
        did[f"when {what}"] += 1
        late = [] if what in ("cancel", "dead") else model.late(now_s)
        is_alive = bool(model.renewed_s) and not model.outcome
        expected: list[Said] = late
        match what:
            case "offer":
                part, was_ended = prompt.part(model.num_offered, end), bool(model.outcome)
                got = source.offer(part, READER, 60.0, now_s)
                if not model.renewed_s and model.outcome:  # a drop came before
                    expected = [("SourceReleased",)]
                elif not was_ended:
                    expected = [("part", part.first_block, part.block_ids, part.is_last)]
                model.renewed_s = model.renewed_s or [now_s]
                model.num_offered = end
            case "renew":
                num_blocks = rng.randint(0, model.num_offered)
                got = source.receive(note(NoteKind.RENEW, num_blocks), READER, now_s)
                if is_alive:
                    model.heard.append(num_blocks)
                    model.renewed_s.append(now_s)
                else:
                    expected = [*late, ("confirm",) if model.outcome == "confirmed" else ("refuse",)]
            case "done":
                got = source.receive(note(NoteKind.DONE), READER, now_s)
                if is_alive and model.num_offered == prompt.size:
                    model.outcome = "confirmed"
                    expected = [("confirm",), ("SourceReleased",)]
                elif not is_alive:
                    expected = [*late, ("confirm",) if model.outcome == "confirmed" else ("refuse",)]
            case "drop":
                got = source.receive(note(NoteKind.DROP), READER, now_s)
                if is_alive:
                    expected = [("SourceReleased",)]
                model.outcome = model.outcome or "dropped"
            case "cancel":
                got = source.cancel("t", now_s)
                expected = [("drop",), ("SourceReleased",)] if is_alive else []
                model.outcome = "cancelled" if is_alive else model.outcome
            case "dead":
                got = source.peer_dead(READER, now_s)
                expected = [("SourceReleased",)] if is_alive else []
                model.outcome = "dead" if is_alive else model.outcome
            case _:
                got = source.tick(now_s)
                if is_alive and got:
                    assert max(model.heard) < model.num_offered, "it was answered"
                    expected = [model.unheard()]
        assert said(got) == expected, what
        assert source.num_open == (bool(model.renewed_s) and not model.outcome)
        did.update(str(word[0]) for word in said(got))
    return did


@pytest.mark.parametrize("batch", range(4))
def test_a_source_does_what_the_model_says(batch: int) -> None:
    did: Counter[str] = Counter()
    for seed in range(batch * NUM_SEEDS, (batch + 1) * NUM_SEEDS):
        try:
            did += run_source(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    kinds = ("part", "confirm", "refuse", "drop", "SourceReleased")
    for what in (*kinds, "when done", "when drop", "when cancel", "when dead"):
        assert did[what] > 0, did
