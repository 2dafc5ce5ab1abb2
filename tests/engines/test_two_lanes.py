"""Prompts beside rows in one engine: the same texts as anywhere else, and no stream waits for a prompt's step."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from replicas.engine.engine import Engine
from replicas.engine.two_lane_engine import TwoLaneEngine
from replicas.model.model_runner import ModelRunner, NotDivisible
from replicas.serving import engine_builder
from replicas.settings import EngineSettings, FaultSettings
from scheduler.admission import AdmissionPolicy
from scheduler.beam_search import BeamParams
from scheduler.lane_split import WHOLE_CARD, LaneShare
from scheduler.length_estimator import LengthEstimator
from scheduler.plan import StepPlan
from scheduler.request import RequestState
from scheduler.sampling_params import SamplingParams
from tests.engines.local_system import GREEDY, Generated, LocalSystem, collect
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

PATIENCE_S = 120.0
STEP_TOKENS = 48  # so that prompts come in chunks
PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(9 + 25 * number)] for number in range(8)]
SEEDED = [SamplingParams(temperature=0.8, top_p=0.95, seed=number) for number in range(8)]


@contextmanager
def running(engine: EngineSettings) -> Iterator[LocalSystem]:
    system = LocalSystem(engine, None)
    yield system
    system.close()
    for lane in lanes_of(system)._lanes:
        for thread in (lane.launcher, lane.reader):
            thread.join(PATIENCE_S)  # who closes waits for 10 s only
            assert not thread.is_alive()


def lanes_of(system: LocalSystem) -> TwoLaneEngine:
    engine = system.decode.engine
    assert isinstance(engine, TwoLaneEngine)
    return engine


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def two_lanes(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    changes: dict[str, Any] = {"lag": request.param, "layout": "two_lanes", "max_batch_tokens": STEP_TOKENS}
    changes["has_prefix_cache"] = False  # prompts are asked again, and all of them are to be computed
    with running(tiny_settings("decode", tiny_goldens.folder, **changes)) as system:
        yield system


@pytest.fixture(scope="module")
def one_lane(tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    system = LocalSystem(tiny_settings("decode", tiny_goldens.folder, lag=1, kv_capacity_tokens=8192), None)
    yield system
    system.close()


def texts_of(system: LocalSystem, asked: list[Generation]) -> list[dict[int, list[int]]]:
    texts = [got.token_ids for got in system.run(asked)]
    asyncio.run(system.wait_for_baseline())
    return texts


def test_texts_are_those_of_transformers(two_lanes: LocalSystem, tiny_goldens: TinyGoldens) -> None:
    goldens = [tiny_goldens.of(length) for length in (1, 15, 16, 17, 33, 100, 150, 200)]
    texts = texts_of(two_lanes, [two_lanes.generation(golden.prompt_ids, 64) for golden in goldens])
    assert texts == [{0: golden.output_ids[:64]} for golden in goldens]


def test_choices_seeds_and_ends_are_those_of_one_lane(two_lanes: LocalSystem, one_lane: LocalSystem) -> None:
    def specs(system: LocalSystem) -> list[Generation]:
        made = [system.generation(p, 60, s, num_choices=3) for p, s in zip(PROMPTS, SEEDED, strict=True)]
        made += [
            system.generation(p, 60, s, stop_token_ids=frozenset(range(40)))
            for p, s in zip(PROMPTS, SEEDED, strict=True)
        ]
        made += [system.generation(prompt, 1) for prompt in PROMPTS]
        penalised = [replace(s, presence_penalty=0.5, repetition_penalty=1.2, num_logprobs=2) for s in SEEDED]
        return made + [system.generation(p, 40, s) for p, s in zip(PROMPTS, penalised, strict=True)]

    assert texts_of(two_lanes, specs(two_lanes)) == texts_of(one_lane, specs(one_lane))


def test_beam_searches_are_those_of_one_lane(two_lanes: LocalSystem, one_lane: LocalSystem) -> None:
    def specs(system: LocalSystem) -> list[Generation]:
        beams = [BeamParams(2 + number % 3, 1.0, early_stopping=False) for number in range(8)]
        pairs = zip(PROMPTS, beams, strict=True)
        return [system.generation(prompt, 24, num_choices=2, beam=beam) for prompt, beam in pairs]

    assert texts_of(two_lanes, specs(two_lanes)) == texts_of(one_lane, specs(one_lane))


def test_scores_of_prompts_beside_rows(two_lanes: LocalSystem, one_lane: LocalSystem) -> None:
    """They take the model's forward method in pieces, which the other lane is running."""

    def specs(system: LocalSystem) -> list[Generation]:
        scored = [replace(GREEDY, num_prompt_logprobs=2) for _ in PROMPTS]
        return [system.generation(p, 30, s) for p, s in zip(PROMPTS * 2, scored + SEEDED, strict=True)]

    got, expected = two_lanes.run(specs(two_lanes)), one_lane.run(specs(one_lane))
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert len(flat(mine)) == len(flat(theirs))
        for score, other in zip(flat(mine), flat(theirs), strict=True):
            assert (score is None) == (other is None)
            assert score is None or score.logprob == pytest.approx(other.logprob, abs=1e-4)


def flat(generated: Generated) -> list[Any]:
    return [score for prompt in generated.prompts for score in prompt.positions]


# -- a stream waits for no prompt ---------------------------------------------------------------------


def hold_prompts(
    system: LocalSystem, monkeypatch: pytest.MonkeyPatch, length: int, *, rows_wait: bool = False
) -> tuple[threading.Event, list[int]]:
    """Chunks of a prompt this long do not end before the event; rows: how many each step of rows had meanwhile.

    rows_wait: no row is computed before that prompt is.
    """
    forward, goes_on, rows = system.decode.engine.runner._forward, threading.Event(), list[int]()
    is_held = threading.Event()

    def held(plan: StepPlan) -> torch.Tensor:
        if any(len(chunk.token_ids) == length for chunk in plan.chunks):
            is_held.set()
            assert goes_on.wait(PATIENCE_S)
        elif plan.rows:
            assert not rows_wait or is_held.wait(PATIENCE_S)
            if is_held.is_set() and not goes_on.is_set():
                rows.append(len(plan.rows))
        return forward(plan)

    monkeypatch.setattr(system.decode.engine.runner, "_forward", held)
    return goes_on, rows


async def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.001)


def test_streams_go_on_while_a_prompt_is_computed(
    two_lanes: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    goldens, late = [tiny_goldens.of(length) for length in (15, 16, 17)], tiny_goldens.of(33)
    goes_on, rows = hold_prompts(two_lanes, monkeypatch, 33, rows_wait=True)

    async def run() -> tuple[list[Generated], Generated]:
        router = await two_lanes.start_router()
        try:
            asked = [two_lanes.generation(golden.prompt_ids, 64) for golden in goldens]
            streams = [asyncio.create_task(collect(router, generation)) for generation in asked]
            await until(lambda: len(two_lanes.decode.engine.scheduler.batch) == len(goldens))
            held = asyncio.create_task(collect(router, two_lanes.generation(late.prompt_ids, 64)))
            done = await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)  # all of their texts
            goes_on.set()
            return done, await held
        finally:
            goes_on.set()
            await router.stop()

    done, held = asyncio.run(run())
    assert [got.token_ids[0] for got in done] == [golden.output_ids[:64] for golden in goldens]
    assert held.token_ids[0] == late.output_ids[:64]
    assert sum(rows) == 63 * len(goldens), "the prompt was not being computed while the streams went on"


def test_a_request_that_is_cancelled_while_its_prompt_is_computed(
    two_lanes: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks and slots are nobody's until that step is over, whatever the other lane commits."""
    golden = tiny_goldens.of(16)
    goes_on, _ = hold_prompts(two_lanes, monkeypatch, 33, rows_wait=True)  # else the stream may be over by then
    scheduler = two_lanes.decode.engine.scheduler

    async def run() -> Generated:
        router = await two_lanes.start_router()
        try:
            stream = asyncio.create_task(collect(router, two_lanes.generation(golden.prompt_ids, 64)))
            await until(lambda: len(scheduler.batch) == 1)
            gone = asyncio.create_task(collect(router, two_lanes.generation(tiny_goldens.of(33).prompt_ids, 64)))
            await until(lambda: any(r.state is RequestState.PREFILLING for r in list(scheduler._requests.values())))
            gone.cancel()
            await until(lambda: bool(scheduler.prefill_lane.ending))
            done = await stream
            assert scheduler.num_running == 1
            assert scheduler.ledger().blocks.request == 3
            goes_on.set()
            await two_lanes.wait_for_baseline()
            return done
        finally:
            goes_on.set()
            await router.stop()

    assert asyncio.run(run()).token_ids[0] == golden.output_ids[:64]


# -- memory that runs short, and what goes wrong ------------------------------------------------------


@pytest.mark.parametrize("host_memory_bytes", [1 << 26, 0], ids=["host memory", "no host memory"])
def test_who_gives_way_beside_prompts(tiny_goldens: TinyGoldens, one_lane: LocalSystem, host_memory_bytes: int) -> None:
    engine = tiny_settings(
        "decode",
        tiny_goldens.folder,
        lag=1,
        layout="two_lanes",
        kv_capacity_tokens=1280,
        admission=AdmissionPolicy(quantile=0.05, min_samples=1),
        host_memory_bytes=host_memory_bytes,
    )
    with running(engine) as tight:
        estimator = tight.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(20)
        specs = [tight.generation(p, 100, s, num_choices=2) for p, s in zip(PROMPTS, SEEDED, strict=True)]
        specs += [tight.generation(prompt, 150) for prompt in PROMPTS]
        assert texts_of(tight, specs) == texts_of(one_lane, specs)
        preemption = tight.decode.engine.scheduler.preemption
        assert (preemption.num_swapped if host_memory_bytes else preemption.num_evicted) > 0
        assert preemption.num_host_blocks_used == preemption.num_cooling == len(preemption) == 0


POISON_PROMPT = [17] * 21


@pytest.mark.parametrize("fault", ["raises", "not a number"])
@pytest.mark.parametrize("lane", ["prefill", "decode"])
def test_a_poisoned_request_fails_alone(
    two_lanes: LocalSystem, tiny_goldens: TinyGoldens, lane: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, goldens = two_lanes.decode.engine.runner, [tiny_goldens.of(length) for length in (15, 16, 17, 33)]
    forward, poisoned, hits = runner._forward, set[str](), list[str]()

    def faulty(plan: StepPlan) -> Any:
        poisoned.update(chunk.request_id for chunk in plan.chunks if list(chunk.token_ids) == POISON_PROMPT)
        names = [row.request_id for row in plan.rows] or [chunk.request_id for chunk in plan.chunks]
        if not poisoned.intersection(names) or bool(plan.rows) != (lane == "decode"):
            return forward(plan)
        hits.append(fault)
        if fault == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        logits = forward(plan)
        logits[[index for index, name in enumerate(names) if name in poisoned]] = torch.nan
        return logits

    monkeypatch.setattr(runner, "_forward", faulty)

    async def run() -> tuple[list[Generated], ApiError]:
        router = await two_lanes.start_router(max_retries=0)
        try:
            bad = asyncio.create_task(collect(router, two_lanes.generation(POISON_PROMPT, 32)))
            good = await asyncio.gather(*(collect(router, two_lanes.generation(g.prompt_ids, 24)) for g in goldens))
            with pytest.raises(ApiError) as raised:
                await bad
            await two_lanes.wait_for_baseline()
            return good, raised.value
        finally:
            await router.stop()

    good, error = asyncio.run(run())
    assert hits
    assert error.status == 500
    assert [got.token_ids for got in good] == [{0: golden.output_ids[:24]} for golden in goldens]
    asyncio.run(until(lambda: two_lanes.decode.engine.is_healthy(max_silence_s=10)))


@pytest.mark.parametrize("lane", ["prefill", "decode"])
def test_a_step_that_fails_as_a_whole_costs_all_requests_and_nothing_else(
    two_lanes: LocalSystem, tiny_goldens: TinyGoldens, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lanes stand still before any block is free, and go on afterwards."""
    engine, golden = lanes_of(two_lanes), tiny_goldens.of(100)
    prepare, has_failed, running_at_release = engine.runner._prepare, list[int](), list[int]()

    def failing(plan: StepPlan) -> None:
        """The step, and then what goes before its pieces: that is nobody's own."""
        is_step = bool(plan.rows) if lane == "decode" else bool(plan.chunks and plan.chunks[0].start)
        is_before_pieces = plan.is_empty and has_failed == [plan.step_id]
        if (is_step and not has_failed) or is_before_pieces:
            has_failed.append(plan.step_id)
            raise LookupError("a bug of ours")
        prepare(plan)

    release = engine.scheduler._release

    def releasing(request: Any) -> None:
        if len(has_failed) == 2:
            running_at_release.append(sum(thread._num_open for thread in engine._lanes))
        release(request)

    async def run() -> ApiError:
        router = await two_lanes.start_router(max_retries=0)
        try:
            with pytest.raises(ApiError) as raised:
                await collect(router, two_lanes.generation(golden.prompt_ids, 24))
            return raised.value
        finally:
            await router.stop()

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_prepare", failing)
        patch.setattr(engine.scheduler, "_release", releasing)
        assert asyncio.run(run()).status == 500
    assert len(has_failed) == 2
    assert running_at_release == [0]
    (text,) = texts_of(two_lanes, [two_lanes.generation(golden.prompt_ids, 24)])
    assert text == {0: golden.output_ids[:24]}


def test_a_lane_that_stands_still_is_seen(
    two_lanes: LocalSystem, tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lanes_of(two_lanes)
    lanes = {"decode-lane", "decode-lane-reader", "prefill-lane", "prefill-lane-reader"}
    assert engine.watched().keys() == {"engine"} | lanes
    goes_on, _ = hold_prompts(two_lanes, monkeypatch, 33)
    beat = engine.watched()["prefill-lane"].beat

    async def run() -> Generated:
        router = await two_lanes.start_router()
        try:
            held = asyncio.create_task(collect(router, two_lanes.generation(tiny_goldens.of(33).prompt_ids, 4)))
            await until(lambda: time.monotonic() - beat() > 0.3)
            stood_s = beat()
            await until(lambda: engine.last_beat_s > stood_s + 0.3)  # the engine itself goes on
            assert beat() == stood_s
            assert not engine.is_healthy(0.3)
            assert engine.is_healthy(3600.0)
            goes_on.set()
            return await held
        finally:
            goes_on.set()
            await router.stop()

    assert asyncio.run(run()).token_ids[0] == tiny_goldens.of(33).output_ids[:4]
    asyncio.run(until(lambda: engine.is_healthy(1.0)))


# -- what operators are told --------------------------------------------------------------------------


def metric_of(system: LocalSystem, name: str) -> dict[str, float]:
    """Values by lane; "" where there is no such label."""
    (family,) = [f for f in system.decode.metrics_snapshot() if f["name"] == name]
    return {labels.get("lane", ""): value for _, labels, value in family["samples"]}


def test_both_lanes_are_counted(two_lanes: LocalSystem) -> None:
    before = metric_of(two_lanes, "splitserve_lane_steps")
    texts_of(two_lanes, [two_lanes.generation(PROMPTS[7], 20)])  # 184 tokens in steps of 48
    after = metric_of(two_lanes, "splitserve_lane_steps")
    assert metric_of(two_lanes, "splitserve_lanes") == {"": 2}
    assert after["prefill"] - before["prefill"] == 4
    assert 19 <= after["decode"] - before["decode"] <= 20
    assert min(metric_of(two_lanes, "splitserve_lane_busy_seconds").values()) > 0.0
    assert metric_of(two_lanes, "splitserve_lane_processors") == {"": 0}
    steps = two_lanes.decode.engine.steps
    assert steps.mean_s < steps.busy_s
    assert two_lanes.decode.engine.status.load.prefill_tokens_per_s > 0.0


def test_steps_are_recorded_as_those_of_two_pools(tiny_goldens: TinyGoldens, tmp_path: Path) -> None:
    testing = FaultSettings(step_record_dir=str(tmp_path))
    engine = tiny_settings(
        "decode", tiny_goldens.folder, layout="two_lanes", max_batch_tokens=STEP_TOKENS, testing=testing
    )
    with running(engine) as system:
        texts_of(system, [system.generation(PROMPTS[7], 20)])
    lines = {path.name.partition("-")[0]: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert {name: len(steps) for name, steps in lines.items()} == {"prefill": 4, "decode": 19}
    assert json.loads(lines["prefill"][0])[4] == STEP_TOKENS
    assert json.loads(lines["decode"][0])[2:4] == [1, len(PROMPTS[7]) + 1]
    for steps in lines.values():
        times = [json.loads(step)[:2] for step in steps]
        assert all(end > start for start, end in times)
        assert all(end <= start for (_, end), (start, _) in pairwise(times)), "steps of one lane overlap"


def test_a_device_that_cannot_be_divided_has_one_lane_and_says_so(
    tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = engine_builder.make_runner

    def undivided(*arguments: Any, has_two_lanes: bool = False, **drafting: Any) -> Any:
        if has_two_lanes:
            raise NotDivisible("the driver has no cuGreenCtxCreate: it is older than CUDA 12.4")
        return make(*arguments, **drafting)

    monkeypatch.setattr(engine_builder, "make_runner", undivided)
    system = LocalSystem(tiny_settings("decode", tiny_goldens.folder, layout="two_lanes"), None)
    try:
        assert type(system.decode.engine) is Engine
        (record,) = [vars(record) for record in caplog.records if vars(record).get("event") == "one_lane"]
        assert record["reason"] == "the driver has no cuGreenCtxCreate: it is older than CUDA 12.4"
        golden = tiny_goldens.of(33)
        assert texts_of(system, [system.generation(golden.prompt_ids, 20)]) == [{0: golden.output_ids[:20]}]
        assert metric_of(system, "splitserve_lanes") == {"": 1}
    finally:
        system.close()


class Divisible(ModelRunner):
    """A device of which prompts get a part. asked: the share of each of their steps."""

    shares = (LaneShare(66, 0.5, 0.5),)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[LaneShare] = []

    def beside(self, share: LaneShare) -> ModelRunner:
        self.asked.append(share)
        return self


def test_prompts_have_the_whole_device_until_there_are_rows(
    tiny_goldens: TinyGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divisible(*arguments: Any, has_two_lanes: bool, **drafting: Any) -> ModelRunner:
        assert has_two_lanes
        assert not drafting
        return Divisible(*arguments)

    monkeypatch.setattr(engine_builder, "make_runner", divisible)
    engine = tiny_settings(
        "decode", tiny_goldens.folder, lag=1, layout="two_lanes", max_batch_tokens=STEP_TOKENS, has_prefix_cache=False
    )
    with running(engine) as system:
        runner = system.decode.engine.runner
        assert isinstance(runner, Divisible)
        runner.asked.clear()  # those of the self-check
        golden = tiny_goldens.of(150)
        first = system.generation(golden.prompt_ids, 64)
        forward, goes_on = runner._forward, threading.Event()

        def rows_held(plan: StepPlan) -> torch.Tensor:
            assert not plan.rows or goes_on.wait(PATIENCE_S)
            return forward(plan)

        monkeypatch.setattr(runner, "_forward", rows_held)

        async def run() -> list[Generated]:
            router = await system.start_router()
            try:
                stream = asyncio.create_task(collect(router, first))
                await until(lambda: len(system.decode.engine.scheduler.batch) == 1)
                short = await collect(router, system.generation(golden.prompt_ids, 1))
                goes_on.set()
                return [short, await stream]
            finally:
                goes_on.set()
                await router.stop()

        short, whole = asyncio.run(run())
    assert runner.asked == [WHOLE_CARD] * 4 + [runner.shares[0]] * 4
    assert whole.token_ids[0][:60] == golden.output_ids[:60]
    assert short.token_ids[0] == golden.output_ids[:1]
