"""Bugs put into the shipped code, each for as long as a test wants it: to see that the simulation finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec import structs

from cluster.routing import generation, pairing
from replicas.engine import handoffs
from replicas.kv import expected_transfer, handoff_reader, handoff_source, transfer_driver
from replicas.kv.handoff_actions import Action, SendNote, SourceOutcome, SourceReleased
from replicas.messages import NoteKind, TransferNote

Patches = list[tuple[Any, str, Any]]  # of what, which name, by what


def _epoch_unchecked() -> Patches:
    """Who has started again answers for who was there before: it confirms what that one had offered."""
    real = handoff_source.HandoffSource.receive

    def receive(self: Any, note: TransferNote, agent_name: str, now_s: float) -> list[Action]:
        if note.source_epoch != self._epoch and note.kind is NoteKind.DONE:
            return [SendNote(agent_name, structs.replace(note, kind=NoteKind.CONFIRM))]
        return real(self, note, agent_name, now_s)

    return [(handoff_source.HandoffSource, "receive", receive)]


def _freed_before_the_end() -> Patches:
    """A source frees its blocks when it has offered them, and not when the reader has them."""
    real = handoffs.Handoffs.prompt_done

    def prompt_done(self: Any, done: Any) -> None:
        real(self, done)
        self._scheduler.lease_ended(done.request_id, 0.0)

    return [(handoffs.Handoffs, "prompt_done", prompt_done)]


def _release_lost() -> Patches:
    """Nobody is told of leases that have expired."""
    real = handoffs.Handoffs.on_event

    def on_event(self: Any, event: Any) -> None:
        if not (isinstance(event, SourceReleased) and event.outcome is SourceOutcome.EXPIRED):
            real(self, event)

    return [(handoffs.Handoffs, "on_event", on_event)]


def _replayed_twice() -> Patches:
    """Who goes on after a failure decodes the last token that the client has once more."""
    real = generation.Leg.attempt_spec

    def attempt_spec(self: Any) -> Any:
        self._base = max(0, self._base - 1)
        try:
            return real(self)
        finally:
            self._base = len(next(iter(self._choices.values())).token_ids)

    return [(generation.Leg, "attempt_spec", attempt_spec)]


def _moved_twice() -> Patches:
    """Who goes on at another engine decodes the last token of the old one once more."""
    real = handoffs.Handoffs._join_batch

    def join_batch(self: Any, request: Any, handoff: Any) -> None:
        moved = tuple(one._replace(token_ids=one.token_ids[:-1] or one.token_ids) for one in handoff.moved)
        real(self, request, structs.replace(handoff, moved=moved))

    return [(handoffs.Handoffs, "_join_batch", join_batch)]


def _unlike_accepted() -> Patches:
    """Nobody compares fingerprints."""
    expect, mismatch = handoff_reader.HandoffReader.expect, expected_transfer.ExpectedTransfer.mismatch
    choose_prefill = pairing.choose_prefill

    def expects(self: Any, transfer_id: str, source: Any, *rest: Any) -> list[Action]:
        known, self._fingerprint = self._fingerprint, source.fingerprint
        try:
            return expect(self, transfer_id, source, *rest)
        finally:
            self._fingerprint = known

    def any_matches(self: Any, handoff: Any, fingerprint: str, require_digests: bool) -> str:
        return mismatch(self, handoff, handoff.fingerprint, require_digests)

    def choose(need: Any, candidates: Any, decode: Any, *rest: Any) -> Any:
        return choose_prefill(need, [one._replace(fingerprint=decode.fingerprint) for one in candidates], decode, *rest)

    return [
        (transfer_driver, "refuse_unlike", lambda fingerprint, other: None),
        (handoff_reader.HandoffReader, "expect", expects),
        (expected_transfer.ExpectedTransfer, "mismatch", any_matches),
        (pairing, "choose_prefill", choose),
    ]


BUGS: Mapping[str, Callable[[], Patches]] = {
    "epoch unchecked": _epoch_unchecked,
    "freed before the end": _freed_before_the_end,
    "release lost": _release_lost,
    "moved decoded twice": _moved_twice,
    "replayed decoded twice": _replayed_twice,
    "unlike accepted": _unlike_accepted,
}


@contextmanager
def with_bug(name: str) -> Iterator[None]:
    """Until the end our code has this bug."""
    with ExitStack() as stack:
        for owner, attribute, broken in BUGS[name]():
            stack.enter_context(patch.object(owner, attribute, broken))
        yield
