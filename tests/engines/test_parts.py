"""Real engines: prompts of many chunks are read while they are computed. Whatever befalls a part, the text is right."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.policies.routing_policy import RoutingRules
from replicas.kv.handoff_actions import Action, SendNote
from replicas.kv.transfer_driver import TransferDriver
from replicas.messages import Handoff, TransferNote, TransferPeer
from replicas.serving.engine_builder import BuiltEngine
from replicas.settings import FaultSettings
from scheduler.beam_search import BeamParams
from scheduler.outcome import PromptPart
from scheduler.sampling_params import SamplingParams
from tests.engines import local_system
from tests.engines.local_system import Generated, LocalSystem, collect, touch
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

CHUNK, BLOCK = 32, 16
LONG = 300  # tokens: ten chunks, 19 blocks
WAIT_S = 60.0


def make(goldens: TinyGoldens, fault_dir: Path, **changes: object) -> LocalSystem:
    testing = FaultSettings(str(fault_dir))
    decode = tiny_settings("decode", goldens.folder, testing=testing, **changes)
    prefill = tiny_settings("prefill", goldens.folder, testing=testing, max_batch_tokens=CHUNK, **changes)
    return LocalSystem(decode, prefill)


@pytest.fixture(scope="module")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def system(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens, fault_dir: Path) -> Iterator[LocalSystem]:
    system = make(tiny_goldens, fault_dir, lag=request.param, has_prefix_cache=False)
    yield system
    system.close()


@pytest.fixture(autouse=True)
def always_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is at the moment."""
    monkeypatch.setattr(local_system, "RoutingRules", partial(RoutingRules, local_by_cost=False))


def prefill_of(system: LocalSystem) -> BuiltEngine:
    assert system.prefill is not None
    return system.prefill


def num_read(system: LocalSystem) -> int:
    """Blocks that decode has read."""
    return system.decode.transfers.snapshot().bytes_read // system.decode.layout.block_bytes


def check(got: Generated, output_ids: Sequence[int], max_tokens: int) -> None:
    assert got.token_ids[0] == output_ids[:max_tokens]
    assert got.finish_reasons == {0: "length"}


class Sent:
    """The parts that are offered; and what both ends of a system send of them, but for what reads carry. (A DONE of
    the test before that went twice may still be answered.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[Handoff] = []
        self.kinds: Counter[str] = Counter()
        offer, send = TransferDriver.offer, TransferDriver._send

        def offering(driver: TransferDriver, handoff: Handoff, reader: TransferPeer, deadline_s: float) -> None:
            self.parts.append(handoff)
            offer(driver, handoff, reader, deadline_s)

        def sending(driver: TransferDriver, order: SendNote) -> None:
            message = order.message
            if any(part.transfer_id == message.transfer_id for part in self.parts):
                self.kinds[str(message.kind) if isinstance(message, TransferNote) else type(message).__name__] += 1
            send(driver, order)

        monkeypatch.setattr(TransferDriver, "offer", offering)
        monkeypatch.setattr(TransferDriver, "_send", sending)


# -- as it should be -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [CHUNK, CHUNK + 1, 2 * CHUNK, 100, LONG])
def test_the_text_is_the_golden_one_and_each_block_is_read_once(
    system: LocalSystem, num_tokens: int, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, before, sent = tiny_goldens.of(num_tokens), num_read(system), Sent(monkeypatch)
    (got,) = system.run([system.generation(golden.prompt_ids, 32)])
    check(got, golden.output_ids, 32)
    assert num_read(system) - before == -(-num_tokens // BLOCK)
    asyncio.run(system.wait_for_baseline(WAIT_S))
    told = [(part.first_block, part.is_last) for part in sent.parts]
    expected = [(end // BLOCK, False) for end in range(0, num_tokens, CHUNK)]
    expected[-1] = (expected[-1][0], True)
    assert told == expected, "a part for each chunk"
    assert all(part.first_tokens for part in sent.parts if part.is_last)


def test_a_prompt_of_one_chunk_costs_what_it_always_did(
    system: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = tiny_goldens.of(CHUNK, 1)
    for half in (prefill_of(system).transfers._running().source, system.decode.transfers._running().reader):
        monkeypatch.setattr(half, "_timing", replace(half._timing, resend_s=WAIT_S, max_resend_s=WAIT_S))
    sent = Sent(monkeypatch)
    (got,) = system.run([system.generation(golden.prompt_ids, 32)])
    check(got, golden.output_ids, 32)
    asyncio.run(system.wait_for_baseline(WAIT_S))
    assert sent.kinds == {"Handoff": 1, "renew": 1, "confirm": 1}
    assert [(part.first_block, part.is_last) for part in sent.parts] == [(0, True)]


def test_many_prompts_side_by_side(system: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    goldens = [tiny_goldens.of(length, 2) for length in (20, 90, 200, LONG)]
    before = num_read(system)
    results = system.run([system.generation(golden.prompt_ids, 24) for golden in goldens])
    for golden, got in zip(goldens, results, strict=True):
        check(got, golden.output_ids, 24)
    assert num_read(system) - before == sum(-(-len(golden.prompt_ids) // BLOCK) for golden in goldens)
    asyncio.run(system.wait_for_baseline(WAIT_S))


def test_choices_and_beams_are_those_of_a_system_that_computes_the_prompt_in_one(
    system: LocalSystem, tiny_goldens: TinyGoldens
) -> None:
    golden, sampling = tiny_goldens.of(100, 3), SamplingParams(temperature=1.0, seed=11)
    spread = system.generation(golden.prompt_ids, 24, sampling, num_choices=3)
    searched = system.generation(golden.prompt_ids, 12, num_choices=2, beam=BeamParams(2, 1.0, False))
    in_parts = system.run([spread, searched])
    whole = LocalSystem(tiny_settings("decode", tiny_goldens.folder, has_prefix_cache=False), None)
    try:
        spread = whole.generation(golden.prompt_ids, 24, sampling, num_choices=3)
        searched = whole.generation(golden.prompt_ids, 12, num_choices=2, beam=BeamParams(2, 1.0, False))
        expected = whole.run([spread, searched])
    finally:
        whole.close()
    assert [got.token_ids for got in in_parts] == [got.token_ids for got in expected]
    asyncio.run(system.wait_for_baseline(WAIT_S))


def test_a_prompt_that_stops_with_its_first_token_leaves_nothing(
    system: LocalSystem, tiny_goldens: TinyGoldens
) -> None:
    golden = tiny_goldens.of(LONG, 4)
    stop = frozenset({golden.output_ids[0]})
    (got,) = system.run([system.generation(golden.prompt_ids, 16, stop_token_ids=stop)])
    assert (got.token_ids, got.finish_reasons) == ({0: golden.output_ids[:1]}, {0: "stop"})
    asyncio.run(system.wait_for_baseline(WAIT_S))


def test_what_decode_has_cached_is_not_read_whichever_part_it_is_in(tiny_goldens: TinyGoldens, tmp_path: Path) -> None:
    golden = tiny_goldens.of(LONG, 5)
    system = make(tiny_goldens, tmp_path)
    try:
        read = []
        for num_tokens in (150, LONG, LONG):
            before = num_read(system)
            (got,) = system.run([system.generation(golden.prompt_ids[:num_tokens], 24)])
            read.append(num_read(system) - before)
        check(got, golden.output_ids, 24)
        # Of 150 tokens 9 blocks are full; of 300, 18 are, and answers go on in the last one.
        assert read == [10, 19 - 9, 1]
        assert system.decode.engine.steps.num_prefilled_tokens == 0
        asyncio.run(system.wait_for_baseline(WAIT_S))
    finally:
        system.close()


# -- faults ----------------------------------------------------------------------------------------


class StopsAfter:
    """Prefill computes no further chunk when it has offered so many parts of a prompt, until `go_on`."""

    def __init__(self, system: LocalSystem, fault_dir: Path, num_parts: int) -> None:
        self._system, self._hold = system, fault_dir / "hold.prefill.step"
        self._num_parts, self._num_blocks = num_parts, 0
        self._before = num_read(system)
        self._handoffs = prefill_of(system).engine.calls.handoffs
        self._part_done: Callable[[PromptPart], None] = self._handoffs.part_done

    def __enter__(self) -> StopsAfter:
        self._handoffs.part_done = self.part_done  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def part_done(self, part: PromptPart) -> None:
        self._part_done(part)
        self._num_parts -= 1
        self._num_blocks += len(part.block_ids)
        if not self._num_parts:
            self._hold.touch()

    def go_on(self) -> None:
        self._handoffs.part_done = self._part_done  # type: ignore[method-assign]
        self._hold.unlink(missing_ok=True)

    async def read(self) -> None:
        """Until decode has read what was offered, and nothing else can follow."""
        deadline_s = time.monotonic() + WAIT_S
        while self._num_parts > 0 or num_read(self._system) - self._before < self._num_blocks:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.005)


def between_parts(
    system: LocalSystem, fault_dir: Path, generation: object, befall: Callable[[asyncio.Task[Generated]], None]
) -> Generated | None:
    """Run it; when some parts have been read, something befalls it; then prefill goes on. None: it was cancelled."""

    async def run() -> Generated | None:
        router = await system.start_router()
        try:
            with StopsAfter(system, fault_dir, 2) as stopped:
                task = asyncio.ensure_future(collect(router, generation))  # type: ignore[arg-type]
                await stopped.read()
                assert not task.done()
                befall(task)
                await asyncio.sleep(0.05)
            (got,) = await asyncio.gather(task, return_exceptions=True)
            await system.wait_for_baseline(WAIT_S)
            assert isinstance(got, Generated | asyncio.CancelledError), got
            return got if isinstance(got, Generated) else None
        finally:
            await router.stop()

    return asyncio.run(run())


def test_what_is_offered_is_read_while_the_rest_is_still_to_be_computed(
    system: LocalSystem, fault_dir: Path, tiny_goldens: TinyGoldens
) -> None:
    golden = tiny_goldens.of(LONG, 6)
    generation = system.generation(golden.prompt_ids, 16)
    got = between_parts(system, fault_dir, generation, lambda task: None)
    assert got is not None
    check(got, golden.output_ids, 16)


@pytest.mark.parametrize("who", ["the source", "the reader"])
def test_either_end_is_given_up_between_parts(
    system: LocalSystem, fault_dir: Path, tiny_goldens: TinyGoldens, who: str
) -> None:
    golden, prefill = tiny_goldens.of(LONG, 7), prefill_of(system)
    lost = Counter(system.decode.transfers.snapshot().results)
    let_go = Counter(prefill.transfers.snapshot().results)

    def befall(task: asyncio.Task[Generated]) -> None:
        if who == "the source":
            system.decode.transfers.forget_peer(prefill.peer.agent_name)
        else:
            prefill.transfers.forget_peer(system.decode.peer.agent_name)

    got = between_parts(system, fault_dir, system.generation(golden.prompt_ids, 16), befall)
    assert got is not None
    check(got, golden.output_ids, 16)
    lost = Counter(system.decode.transfers.snapshot().results) - lost
    let_go = Counter(prefill.transfers.snapshot().results) - let_go
    if who == "the source":
        assert lost["lost: peer dead"] == 1
    else:
        assert let_go["source: peer dead"] == 1


def test_cancelled_between_parts(system: LocalSystem, fault_dir: Path, tiny_goldens: TinyGoldens) -> None:
    before = num_read(system)
    generation = system.generation(tiny_goldens.of(LONG, 8).prompt_ids, 16)
    assert between_parts(system, fault_dir, generation, lambda task: task.cancel() and None) is None
    assert num_read(system) - before <= 3 * CHUNK // BLOCK, "no more than was offered by then"
    golden = tiny_goldens.of(LONG, 8)
    (got,) = system.run([system.generation(golden.prompt_ids, 16)])
    check(got, golden.output_ids, 16)


def test_a_block_of_an_earlier_part_is_changed_before_it_is_read(
    system: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its digest's back. Decode disputes it while later chunks are computed. The prompt is computed again."""
    golden, prefill = tiny_goldens.of(LONG, 9), prefill_of(system)
    source, pool = prefill.transfers._running().source, prefill.engine.runner.pool.tensor
    offer, changed = source.offer, list[int]()
    errors = Counter(prefill.transfers.snapshot().errors)

    def offering(handoff: Handoff, *rest: Any) -> list[Action]:
        if handoff.first_block == 2 and not changed:  # it is digested, and its reader not told yet
            changed.append(handoff.block_ids[0])
            pool[handoff.block_ids[0]] += 1.0
        return offer(handoff, *rest)

    monkeypatch.setattr(source, "offer", offering)
    before = Counter(system.decode.transfers.snapshot().results)
    (got,) = system.run([system.generation(golden.prompt_ids, 16)])
    check(got, golden.output_ids, 16)
    assert changed, "nothing was changed"
    assert (Counter(system.decode.transfers.snapshot().results) - before)["lost: digest mismatch"] == 1
    asyncio.run(system.wait_for_baseline(WAIT_S))
    assert (Counter(prefill.transfers.snapshot().errors) - errors)["disputed"] == 1


@pytest.mark.parametrize("which", ["the first part", "a later part", "the last part"])
def test_an_offer_that_raises_fails_its_request_only_and_leaves_nothing(
    system: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """As soon as the transfers themselves are broken: the router tries elsewhere."""
    golden, transfers, raised = tiny_goldens.of(LONG, 12), prefill_of(system).transfers, []
    offer = transfers.offer

    def offering(transfer_id: str, **part: Any) -> None:
        is_it = {"the first part": part["first_block"] == 0, "the last part": part["is_last"]}
        if not raised and is_it.get(which, part["first_block"] == 4):
            raised.append(transfer_id)
            raise RuntimeError("injected")
        offer(transfer_id, **part)

    monkeypatch.setattr(transfers, "offer", offering)
    (got,) = system.run([system.generation(golden.prompt_ids, 16)])
    check(got, golden.output_ids, 16)
    assert raised
    asyncio.run(system.wait_for_baseline(WAIT_S))


def test_a_block_is_changed_on_its_way(system: LocalSystem, fault_dir: Path, tiny_goldens: TinyGoldens) -> None:
    golden = tiny_goldens.of(LONG, 10)
    touch(fault_dir, "corrupt.received")
    (got,) = system.run([system.generation(golden.prompt_ids, 16)])
    check(got, golden.output_ids, 16)
    did = fault_dir / "did.corrupt.received"
    assert did.exists()
    did.unlink()
    asyncio.run(system.wait_for_baseline(WAIT_S))


@pytest.mark.parametrize("seed", range(3))
def test_parts_that_are_lost_doubled_and_out_of_order(
    system: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What the source sends, and the reader's answers. Texts are right, each block is read once, none is retried."""
    rng, did, held = random.Random(seed), Counter[str](), list[tuple[TransferDriver, SendNote]]()
    send = TransferDriver._send

    def sending(driver: TransferDriver, order: SendNote) -> None:
        fate = rng.choice(["lost", "doubled", "late", "sent", "sent"])
        did[fate] += 1
        if fate == "late":
            held.append((driver, order))
            return
        for _ in range({"lost": 0, "doubled": 2}.get(fate, 1)):
            send(driver, order)
        late = [each for each in held if each[0] is driver and rng.random() < 0.5]  # each thread its own
        for each in late:
            held.remove(each)
            send(*each)

    monkeypatch.setattr(TransferDriver, "_send", sending)
    goldens = [tiny_goldens.of(length, 11) for length in (90, LONG, 200)]
    before, results = num_read(system), Counter(system.decode.transfers.snapshot().results)
    gots = system.run([system.generation(golden.prompt_ids, 16) for golden in goldens])
    for golden, got in zip(goldens, gots, strict=True):
        check(got, golden.output_ids, 16)
    assert min(did[fate] for fate in ("lost", "doubled", "late")) > 0
    assert num_read(system) - before == sum(-(-len(golden.prompt_ids) // BLOCK) for golden in goldens)
    assert Counter(system.decode.transfers.snapshot().results) - results == {"ready": 3}
    monkeypatch.undo()
    asyncio.run(system.wait_for_baseline(WAIT_S))
