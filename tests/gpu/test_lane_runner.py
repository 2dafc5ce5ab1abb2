"""The prefill lane's runners beside the decode lane's: the same tokens, over the same memory, and nothing else shared.

On a card as it is. In Triton's interpreter streams are nothing, as in test_cuda_runner.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.logits import SeenLogits, compare, make_cases, reference_rows
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.model.model_runner import NotDivisible
from replicas.model.self_check import self_check
from replicas.settings import ModelSettings
from scheduler.lane_measurement import AbsurdTimes, LaneTimes
from scheduler.lane_split import WHOLE_CARD, LaneShare
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import graph_shapes, lane_runner
from replicas.cuda.cublas_lt import NoCublasLt
from replicas.cuda.lane_runner import DividedRunner, products_of
from replicas.cuda.part_products import part_here
from replicas.cuda.runner import CudaRunner
from replicas.cuda.share_times import MeasuredPlans
from tests.gpu import test_cuda_runner
from tests.gpu.test_cuda_runner import CONFIG, LENGTHS

pytestmark = pytest.mark.interpreted
card = test_cuda_runner.card

GREEDY = SamplingParams(temperature=0.0)
SHARE = LaneShare(92, 0.615, 0.598)
ALONE, BESIDE = LaneTimes(0.050, 0.005), LaneTimes(0.100, 0.008)


@pytest.fixture(autouse=True)
def streams(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_shapes, "_ANYWHERE_ALONE", (16, 32))
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(lane_runner, "times_of_shares", lambda rows, lanes, plans: (ALONE, {SHARE: BESIDE}))
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    monkeypatch.setattr(lane_runner, "lane_streams", lambda device: {SHARE: stream, WHOLE_CARD: stream})
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def loaded_into(kind: type[CudaRunner], folder: Path, device: torch.device) -> CudaRunner:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    loaded = load_model(ModelSettings(str(folder), str(folder), "float16", 256, "dummy", False), device)
    for module in loaded.model.modules():  # on a CPU some lie in column order
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight.data = module.weight.data.contiguous()
    return kind(loaded, KvPool(loaded.kv_layout(16), 128, device), len(LENGTHS), 256)


def test_nothing_but_weights_pool_and_slots_is_shared(device: torch.device, tmp_path: Path) -> None:
    runner = loaded_into(DividedRunner, tmp_path, device)
    assert isinstance(runner, DividedRunner)
    share = runner.shares[0]
    beside = runner.beside(share)
    assert beside is not runner.beside(WHOLE_CARD)
    assert beside._model is runner.beside(WHOLE_CARD)._model is not runner._model
    assert (beside.pool, beside._slots) == (runner.pool, runner._slots)
    mine, theirs = dict(runner._model.named_parameters()), dict(beside._model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(theirs[name] is weight for name, weight in mine.items())
    modules = dict(beside._model.named_modules())
    assert not {id(module) for module in runner._model.modules()} & {id(module) for module in modules.values()}
    buffers = dict(beside._model.named_buffers())
    apart = {name for name, buffer in runner._model.named_buffers() if buffers[name] is not buffer}
    assert {name.rpartition(".")[2] for name in apart} == {"arrived"}


def test_each_share_passes_the_self_check_before_and_after_its_graphs(device: torch.device, tmp_path: Path) -> None:
    runner = loaded_into(DividedRunner, tmp_path, device)
    self_check(runner, runner._loaded)
    assert runner.warm_up()
    for checked in (runner, *[runner.beside(share) for share in (*runner.shares, WHOLE_CARD)]):
        checked.prepare_thread(256)
        self_check(checked, runner._loaded)
        checked.finish()


def plans_of_two_requests() -> list[StepPlan]:
    """A fresh prompt, one in chunks, and some rows of both. No step has prompts and rows."""
    tables = (TableWrite(0, 0, tuple(range(4))), TableWrite(1, 0, tuple(range(20, 24))))
    first, second = tuple(range(10, 30)), tuple(range(100, 125))
    targets = (SampleTarget(0, 0),), (SampleTarget(1, 0),)
    chunks = (
        Slice.of_prompt("a", 0, 0, first, targets[0]),
        Slice.of_prompt("b", 1, 0, second[:10], ()),
        Slice.of_prompt("b", 1, 10, second[10:], targets[1]),
    )
    inits = (SlotInit(0, 0, GREEDY, None), SlotInit(1, 0, GREEDY, None))
    plans = [StepPlan(0, inits, tables, (), chunks[:2]), StepPlan(1, (), (), (), chunks[2:])]
    for number in range(3):
        rows = (Slice("a", 0, 0, 20 + number), Slice("b", 0, 1, 25 + number))
        plans.append(StepPlan(2 + number, (), (), (), rows))
    return plans


@pytest.mark.timeout(900)
@torch.inference_mode()
def test_prompts_of_one_lane_and_rows_of_the_other_are_those_of_one_runner(
    device: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = loaded_into(CudaRunner, tmp_path / "one", device)
    two = loaded_into(DividedRunner, tmp_path / "two", device)
    assert isinstance(two, DividedRunner)
    two.warm_up()
    texts: list[list[Any]] = []
    for runner, prompts in ((one, one), (two, two.beside(two.shares[0])), (two, two.beside(WHOLE_CARD))):
        tokens: list[Any] = []
        for plan in plans_of_two_requests():
            where = prompts if plan.chunks else runner
            tokens += [token.token_id for token in where.launch(plan).result().tokens]
        texts.append(tokens)
    assert len(texts[0]) == 8
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


@pytest.mark.timeout(900)
@torch.inference_mode()
def test_logits_of_both_lanes_are_as_exact_as_transformers(device: torch.device, tmp_path: Path) -> None:
    runner = loaded_into(DividedRunner, tmp_path, device)
    runner.warm_up()
    cases = make_cases(LENGTHS, CONFIG["vocab_size"])
    exact, rounded = (
        reference_rows(str(tmp_path), cases, dtype, device, torch.float16) for dtype in (torch.float32, torch.float16)
    )
    for share in (*runner.shares[:1], WHOLE_CARD):
        seen = SeenLogits(runner, cases, runner.beside(share))
        with seen.watch():
            seen.run()
        for way in compare(seen.rows, exact, rounded):
            assert way["ours mean"] <= 1.5 * way["HF mean"], (share, way)
        assert 0 < seen.num_drawn == seen.num_best


def shares_told(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [vars(record) for record in caplog.records if vars(record).get("event") == "lane_shares"]
    return record


def test_the_shares_have_the_rates_that_were_measured_at_start(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = loaded_into(DividedRunner, tmp_path, device)
    assert isinstance(runner, DividedRunner)
    before = {share.num_processors: runner.beside(share) for share in runner.shares}
    with caplog.at_level("INFO"):
        runner.warm_up()
    told = shares_told(caplog)
    assert [share["processors"] for share in told["shares"]] == [share.num_processors for share in runner.shares]
    assert {share.num_processors: runner.beside(share) for share in runner.shares} == before
    assert runner.beside(WHOLE_CARD) not in before.values()
    if not torch.cuda.is_available():
        assert runner.shares == (LaneShare(92, 0.5, 0.625),)
        assert told["prompts_ms"] == 50.0


def test_what_cannot_be_measured_keeps_its_estimates_and_says_so(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise AbsurdTimes("2 steps of rows ended beside 3 prompts")

    monkeypatch.setattr(lane_runner, "times_of_shares", fails)
    runner = loaded_into(DividedRunner, tmp_path, device)
    before = runner.shares
    runner.warm_up()
    assert runner.shares == before
    assert shares_told(caplog)["reason"] == "2 steps of rows ended beside 3 prompts"


def test_what_is_measured_is_a_prompt_and_rows_apart_from_each_other() -> None:
    plans = MeasuredPlans(num_slots=8, num_blocks=100, block_size=16, max_model_len=512)
    of_rows = {block for write in plans.first_rows.table_writes for block in write.block_ids}
    of_prompt = {block for write in plans.prompt.table_writes for block in write.block_ids}
    assert plans.num_rows == 7
    assert not of_rows & of_prompt
    assert max(of_rows | of_prompt) < 100
    assert plans.prompt.num_prefill_tokens == 511
    assert {row.start for row in plans.rows.rows} == {9 * 16 - 1}, "what is left for each row"
    with pytest.raises(AbsurdTimes, match="20 blocks and 8 slots are too few"):
        MeasuredPlans(num_slots=8, num_blocks=20, block_size=16, max_model_len=512)


def test_ways_of_products_are_chosen_on_the_largest_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_runner, "CublasLt", SimpleNamespace)
    smaller = LaneShare(68, 0.48, 0.69)
    products = products_of((smaller, SHARE, WHOLE_CARD))
    for share, part in products.items():
        with part.used():
            assert part_here() is (part if share is SHARE else None), share


def test_a_missing_library_is_said_and_prompts_are_computed_all_the_same(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise NoCublasLt("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setattr(lane_runner, "CublasLt", missing)
    with caplog.at_level("WARNING"):
        runner = loaded_into(DividedRunner, tmp_path, device)
    (record,) = [vars(record) for record in caplog.records if vars(record).get("event") == "no_cublas_lt"]
    assert "libcublasLt" in record["reason"]
    assert isinstance(runner, DividedRunner)
    beside, chunk = runner.beside(runner.shares[0]), Slice.of_prompt("a", 0, 0, tuple(range(70)), (SampleTarget(0, 0),))
    plan = StepPlan(0, (SlotInit(0, 0, GREEDY, None),), (TableWrite(0, 0, tuple(range(6))),), (), (chunk,))
    assert len(beside.launch(plan).result().tokens) == 1


def test_a_card_that_cannot_be_divided_says_so_before_anything_is_changed(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(device: torch.device) -> Any:
        raise NotDivisible("the driver has no cuGreenCtxCreate: it is older than CUDA 12.4")

    monkeypatch.setattr(lane_runner, "lane_streams", none)
    with pytest.raises(NotDivisible, match=r"older than CUDA 12\.4"):
        loaded_into(DividedRunner, tmp_path, device)
