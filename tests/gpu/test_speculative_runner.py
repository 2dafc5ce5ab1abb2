"""The CUDA runner with drafts: texts are those without, however good the drafts are, and however many steps are in
flight before one of them is known.

On a card as it is; in Triton's interpreter as `test_cuda_runner`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import StepHandle
from replicas.settings import ModelSettings
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from scheduler.plan import RuleContext, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.card_drafts import CardDrafting, DraftShape, columns_of, draft_shapes
from replicas.cuda.card_ngram_drafter import CardNgramDrafter
from replicas.cuda.graph_shapes import batch_sizes
from replicas.cuda.graphs import PlannedPass
from replicas.cuda.runner import CudaRunner
from replicas.cuda.slots import CudaSlots
from replicas.kernels.slot_columns import HISTORY, LENGTH
from replicas.kernels.work_sharing import WorkSharing
from tests.gpu.test_cuda_runner import CONFIG, CalledGraph, card  # noqa: F401 - a fixture

pytestmark = pytest.mark.interpreted

NUM_SLOTS, MAX_LEN, BLOCKS_A_SLOT, MAX_DRAFTS = 6, 112, 7, 4
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=12, seed=5)


def make_runner(loaded: LoadedModel, device: torch.device, drafting: CardDrafting | None) -> CudaRunner:
    pool = KvPool(loaded.kv_layout(16), NUM_SLOTS * BLOCKS_A_SLOT + 1, device)
    return CudaRunner(loaded, pool, NUM_SLOTS, MAX_LEN, drafting=drafting)


class ScriptedDrafter:
    """Knows each slot's text, or so it thinks: of its drafts one in so many is wrong, and some are not made."""

    def __init__(self, slots: CudaSlots, texts: dict[int, list[int]], wrong_in: int) -> None:
        self._slots, self._rng, self._wrong_in = slots, random.Random(7), wrong_in
        width = MAX_LEN + 16
        self._texts = torch.full((NUM_SLOTS, width), NO_DRAFT, dtype=torch.int64)
        for slot, text in texts.items():
            self._texts[slot, : len(text)] = torch.tensor(text)
        self._texts = self._texts.to(slots.state.device)
        self.told: list[tuple[int, int]] = []

    def start(self, init: SlotInit) -> None:
        pass

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        most = max(row.num_drafts for row in rows)
        slots = torch.tensor([row.slot for row in rows], device=self._texts.device)
        places = self._slots.length[slots][:, None] + 1 + torch.arange(most, device=slots.device)
        drafts = self._texts[slots].gather(1, places.clamp(max=self._texts.shape[1] - 1))
        for row in range(len(rows)):
            for column in range(most):
                if self._rng.randrange(self._wrong_in) == 0:
                    drafts[row, column] = (drafts[row, column] + 1) % 290 if self._rng.random() < 0.7 else NO_DRAFT
        return drafts

    def accepted(self, slots: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> None:
        assert tokens.shape[0] == counts.shape[0] == len(slots)
        self.told += [(slot, int(count)) for slot, count in zip(slots, counts.tolist(), strict=True)]


@dataclass
class Sequence_:
    """What a host knows of one: its tokens, and how far steps in flight may bring it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    in_flight: int = 0
    taken: list[int] = field(default_factory=list)  # how many counted, step by step


class Host:
    """Plans as a scheduler does, `lag` steps ahead of what it has read."""

    def __init__(self, runner: CudaRunner, num_new: int, sampling: SamplingParams, lag: int) -> None:
        self.runner, self.num_new, self.sampling, self.lag = runner, num_new, sampling, lag
        self.running: dict[int, Sequence_] = {}
        self.waiting: list[tuple[StepPlan, StepHandle]] = []
        self.step_id = 0

    def begin(self, prompts: dict[int, list[int]], may_draft: bool = True) -> None:
        """Prompts of slots, in one step."""
        inits, tables, chunks = [], [], []
        for slot, prompt in prompts.items():
            context = RuleContext(tuple(prompt), len(prompt))
            inits.append(SlotInit(slot, 0, self.sampling, None, context, may_draft=may_draft))
            blocks = range(1 + slot * BLOCKS_A_SLOT, 1 + (slot + 1) * BLOCKS_A_SLOT)
            tables.append(TableWrite(slot, 0, tuple(blocks)))
            chunks.append(Slice.of_prompt(str(slot), slot, 0, tuple(prompt), (SampleTarget(slot, 0),)))
            self.running[slot] = Sequence_(slot, list(prompt), len(prompt), 1)
        self.launch(StepPlan(self.step_id, tuple(inits), tuple(tables), (), tuple(chunks)))

    def launch(self, plan: StepPlan) -> None:
        self.waiting.append((plan, self.runner.launch(plan)))
        self.step_id += 1
        while len(self.waiting) > self.lag:
            self.read()

    def read(self) -> None:
        plan, handle = self.waiting.pop(0)
        output = handle.result()
        most = {part.request_id: part.num_sampled for part in plan.slices}
        got: dict[str, list[int]] = {name: [] for name in most}
        for token in output.tokens:
            got[token.request_id].append(token.token_id)
        accepted = {a.request_id: a for a in output.accepted}
        for name, tokens in got.items():
            sequence = self.running[int(name)]
            sequence.tokens += tokens
            sequence.in_flight -= most[name]
            sequence.taken.append(len(tokens))
            if name in accepted:
                assert accepted[name].num_accepted == len(tokens)
                assert accepted[name].num_sampled == most[name]
                assert accepted[name].num_drafted >= len(tokens) - 1

    def step(self, drafts: dict[int, int], chunks: tuple[Slice, ...] = (), **extra: object) -> None:
        """A row for each slot in drafts, with so many of them."""
        rows = []
        for slot, num_drafts in drafts.items():
            sequence = self.running[slot]
            start = len(sequence.tokens) - 1 + sequence.in_flight
            count = 1 + num_drafts
            sequence.in_flight += count
            rows.append(Slice(str(slot), 0, slot, start, count, count, num_drafts=num_drafts))
        has_drafts = any(drafts.values())
        self.launch(StepPlan(self.step_id, slices=(*rows, *chunks), has_drafts=has_drafts, **EMPTY | extra))  # type: ignore[arg-type]

    def run(self, num_drafts: dict[int, int]) -> dict[int, list[int]]:
        """Until every sequence has num_new tokens; slots in num_drafts get so many drafts a step."""
        while True:
            left = {
                slot: self.num_new - (len(s.tokens) - s.prompt_len)
                for slot, s in self.running.items()
                if len(s.tokens) - s.prompt_len + s.in_flight < self.num_new
            }
            if not left and not self.waiting:
                break
            if not left:
                self.read()
                continue
            self.step({slot: min(num_drafts.get(slot, 0), count - 1) for slot, count in left.items()})
        return {s.slot: s.tokens[s.prompt_len :][: self.num_new] for s in self.running.values()}


EMPTY = {"slot_inits": (), "table_writes": (), "copies": ()}
PROMPTS = {
    0: [7, 8, 9, 10] * 4, 1: [*range(20, 40)], 3: [5, 6, 5, 6, 7], 4: [50 + i % 7 for i in range(33)]
}  # fmt: skip
NUM_NEW = 12


@pytest.fixture(autouse=True)
def few_graphs(card: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of the interpreter's time most goes into capturing them, and into programs that have nothing to do."""
    if not torch.cuda.is_available():
        properties = SimpleNamespace(multi_processor_count=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("replicas.cuda.card_drafts._ROW_TOKENS", (8, 20))
    monkeypatch.setattr("replicas.cuda.card_drafts._MANY_ROW_TOKENS", (20,))
    monkeypatch.setattr("replicas.cuda.graph_shapes._ALONE", (64,))
    monkeypatch.setattr("replicas.cuda.graph_shapes._BESIDE_ROWS", ((4, (64,), ()),))
    monkeypatch.setattr("replicas.cuda.runner.batch_sizes", lambda largest: [largest])


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def make_prompt_dependent(loaded: LoadedModel) -> None:
    """Random weights of a tiny model make one token over and over; larger ones make some text."""
    generator = torch.Generator().manual_seed(3)
    for parameter in loaded.model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """In float32: in the interpreter products of 16 bits take nearly all of the time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG | SMALL))
    loaded = load_model(ModelSettings(str(folder), str(folder), "float32", 256, "dummy", False), device)
    make_prompt_dependent(loaded)
    return loaded


def texts_without_drafts(loaded: LoadedModel, device: torch.device, sampling: SamplingParams) -> dict[int, list[int]]:
    host = Host(make_runner(loaded, device, None), NUM_NEW, sampling, 0)
    host.begin(PROMPTS)
    return host.run({})


@torch.inference_mode()
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_warm", [True, False], ids=["graphs", "by hand"])
def test_texts_are_those_without_drafts(
    device: torch.device, loaded: LoadedModel, lag: int, sampling: SamplingParams, is_warm: bool
) -> None:
    """Rows of no, some and many drafts in one step, right ones, wrong ones, and some that are missing."""
    expected = texts_without_drafts(loaded, device, sampling)
    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    assert len({tuple(text) for text in expected.values()}) == len(expected), "the texts differ"
    drafters: list[ScriptedDrafter] = []

    def make_drafter(slots: CudaSlots) -> ScriptedDrafter:
        drafters.append(ScriptedDrafter(slots, known, 4))
        return drafters[0]

    runner = make_runner(loaded, device, CardDrafting(make_drafter, MAX_DRAFTS))
    if is_warm:
        runner.warm_up()
    host = Host(runner, NUM_NEW, sampling, lag)
    host.begin(PROMPTS)
    assert host.run({0: 4, 1: 2, 3: 1}) == expected
    # It was told of each token that counts, once; and drafts that were right made steps of several.
    told = dict.fromkeys(PROMPTS, 0)
    for slot, count in drafters[0].told:
        told[slot] += count
    assert told == {slot: sum(host.running[slot].taken) for slot in PROMPTS}
    assert max(host.running[0].taken) > 2
    assert set(host.running[4].taken) == {1}
    for slot, sequence in host.running.items():
        length, number = runner._slots.state[slot, [LENGTH, HISTORY]].tolist()
        assert (length, number) == (len(sequence.tokens) - 1, len(sequence.tokens))
        assert runner._slots.history is not None
        assert runner._slots.history[slot, :number].tolist() == sequence.tokens


@torch.inference_mode()
@pytest.mark.parametrize("lag", [0, 1])
def test_ngrams_draft_what_comes_again(device: torch.device, loaded: LoadedModel, lag: int) -> None:
    """Over prompt and output; steps are fewer than tokens, and the texts are the same."""
    expected = texts_without_drafts(loaded, device, GREEDY)
    # A prompt that has the answer in it.
    prompts = {0: [*PROMPTS[0], *expected[0], 3, *PROMPTS[0]], 1: PROMPTS[1]}
    plain = Host(make_runner(loaded, device, None), NUM_NEW, GREEDY, 0)
    plain.begin(prompts)
    texts = plain.run({})
    drafting = CardDrafting(lambda slots: CardNgramDrafter(slots, MAX_DRAFTS, 2, 4), MAX_DRAFTS)
    runner = make_runner(loaded, device, drafting)
    runner.warm_up()
    host = Host(runner, NUM_NEW, GREEDY, lag)
    host.begin(prompts)
    assert host.run({0: 4, 1: 4}) == texts


@torch.inference_mode()
@pytest.mark.parametrize("is_warm", [True, False], ids=["graphs", "by hand"])
def test_a_step_of_drafts_beside_prompts_computes_both(
    device: torch.device, loaded: LoadedModel, is_warm: bool
) -> None:
    """By graphs one behind the other, or in one pass by hand. The prompts' rows then have drafts themselves."""
    expected = texts_without_drafts(loaded, device, GREEDY)
    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    runner = make_runner(loaded, device, CardDrafting(lambda slots: ScriptedDrafter(slots, known, 9), MAX_DRAFTS))
    if is_warm:
        runner.warm_up()
    host = Host(runner, NUM_NEW, GREEDY, 1)
    host.begin({slot: PROMPTS[slot] for slot in (0, 3)})
    host.step({0: 4, 3: 2})
    chunks, extra = later_prompts(host, (1, 4))
    if runner._graphs is not None:
        row = Slice("0", 0, 0, 30, 5, 5, num_drafts=4)
        plan = StepPlan(0, (), (), (), (row, *chunks), has_drafts=True)
        assert len(runner._graphs.passes(plan) or ()) == 3
    host.step({0: 4, 3: 4}, chunks, **extra)
    assert host.run({0: 4, 1: 3, 4: 2}) == expected


@torch.inference_mode()
def test_few_rows_and_many_have_graphs_of_their_own(
    device: torch.device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tokens: of few rows it is one in which there is no room for many."""
    monkeypatch.setattr("replicas.cuda.card_drafts._FEW_ROWS", 2)
    monkeypatch.setattr("replicas.cuda.card_drafts._ROW_TOKENS", (5, 10))
    monkeypatch.setattr("replicas.cuda.card_drafts._MANY_ROW_TOKENS", (8, 20))
    expected = texts_without_drafts(loaded, device, GREEDY)
    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    runner = make_runner(loaded, device, CardDrafting(lambda slots: ScriptedDrafter(slots, known, 9), MAX_DRAFTS))
    runner.warm_up()
    graphs = runner._graphs
    assert graphs is not None
    used = []
    original = graphs._plan_drafting

    def planned(rows: tuple[Slice, ...]) -> PlannedPass:
        one = original(rows)
        assert one.drafts is not None
        used.append((len(rows), len(one.drafts), len(one.values)))
        return one

    monkeypatch.setattr(graphs, "_plan_drafting", planned)
    host = Host(runner, NUM_NEW, GREEDY, 1)
    host.begin(PROMPTS)
    assert host.run({0: 4, 1: 4, 3: 4, 4: 4}) == expected
    assert max(host.running[0].taken) > 2
    for num_rows, room, num_values in used:
        assert room == 2 if num_rows <= 2 else room == min(6, num_values - 5 * room)
    assert {num_rows > 2 for num_rows, *_ in used} == {True, False}, "both were there"


@torch.inference_mode()
def test_rows_by_hand_without_drafts_are_as_they_are_where_nobody_drafts(
    device: torch.device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts, and where drafts of theirs are in flight: the kernels of rows of one token, at the place where
    the step in front leaves them."""
    from replicas.cuda import card_drafts

    expected = texts_without_drafts(loaded, device, GREEDY)
    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    runner = make_runner(loaded, device, CardDrafting(lambda slots: ScriptedDrafter(slots, known, 99), MAX_DRAFTS))
    host = Host(runner, NUM_NEW, GREEDY, 1)
    host.begin({slot: PROMPTS[slot] for slot in (0, 3)})
    host.step({0: 4, 3: 2})
    chunks, extra = later_prompts(host, (1, 4))

    def unexpected(*arguments: object) -> None:
        raise AssertionError("rows of several tokens, where none has any")

    with monkeypatch.context() as patched:
        patched.setattr(card_drafts, "feed_rows", unexpected)
        host.step({0: 0, 3: 0}, chunks, **extra)
        host.step(dict.fromkeys(PROMPTS, 0))
    assert host.run({0: 4, 1: 3, 4: 2}) == expected
    assert max(host.running[0].taken) > 2, "drafts were in flight"


def later_prompts(host: Host, slots: tuple[int, ...]) -> tuple[tuple[Slice, ...], dict[str, object]]:
    other = Host(RecordedPlans(), NUM_NEW, GREEDY, 9)  # type: ignore[arg-type]
    other.begin({slot: PROMPTS[slot] for slot in slots})
    plan = other.waiting[0][0]
    host.running |= other.running
    return plan.slices, {"slot_inits": plan.slot_inits, "table_writes": plan.table_writes}


class RecordedPlans:
    def launch(self, plan: StepPlan) -> None:
        """Nothing."""


@torch.inference_mode()
def test_rows_of_slots_that_may_not_draft_are_where_plans_say(device: torch.device, loaded: LoadedModel) -> None:
    """Also twice the same step, as a measurement does it."""
    runner = make_runner(loaded, device, CardDrafting(lambda slots: CardNgramDrafter(slots, 4, 2, 4), MAX_DRAFTS))
    runner.warm_up()
    host = Host(runner, 9, GREEDY, 0)
    host.begin({1: PROMPTS[1]}, may_draft=False)
    row = StepPlan(7, (), (), (), (Slice("1", 0, 1, 20),))
    first = runner.launch(row).result().tokens
    last = int(runner._slots.last_token[1])
    runner._slots.last_token[1] = host.running[1].tokens[-1]
    assert runner.launch(row).result().tokens == first
    assert int(runner._slots.last_token[1]) == last
    assert runner._slots.state[1, [LENGTH, HISTORY]].tolist() == [-1, 0]


@torch.inference_mode()
def test_a_drafter_that_fails_costs_drafts_only(
    device: torch.device, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts_without_drafts(loaded, device, GREEDY)

    class Failing(ScriptedDrafter):
        calls = 0

        def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
            Failing.calls += 1
            if Failing.calls == 3:
                raise RuntimeError("no draft today")
            return super().draft(rows)

    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    runner = make_runner(loaded, device, CardDrafting(lambda slots: Failing(slots, known, 100), MAX_DRAFTS))
    runner.warm_up()
    assert runner.can_draft(GREEDY)
    host = Host(runner, NUM_NEW, GREEDY, 1)
    host.begin(PROMPTS)
    assert host.run(dict.fromkeys(PROMPTS, 4)) == expected
    assert Failing.calls == 3
    assert "no more drafts" in caplog.text
    assert not runner.can_draft(GREEDY)


@torch.inference_mode()
def test_a_step_that_fails_is_run_again_from_where_its_slots_were(
    device: torch.device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.cuda import card_drafts

    expected = texts_without_drafts(loaded, device, GREEDY)
    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    runner = make_runner(loaded, device, CardDrafting(lambda slots: ScriptedDrafter(slots, known, 99), MAX_DRAFTS))
    runner.warm_up()
    host = Host(runner, NUM_NEW, GREEDY, 0)
    host.begin(PROMPTS)
    original = card_drafts.accept_drafts

    def failing(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        raise RuntimeError("out of memory")

    before = runner._slots.state.clone()
    monkeypatch.setattr(card_drafts, "accept_drafts", failing)
    row = Slice("0", 0, 0, len(PROMPTS[0]), 5, 5, num_drafts=4)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.launch(StepPlan(9, (), (), (), (row,), has_drafts=True))
    assert torch.equal(runner._slots.state, before)
    monkeypatch.setattr(card_drafts, "accept_drafts", original)
    assert host.run(dict.fromkeys(PROMPTS, 3)) == expected


@torch.inference_mode()
def test_more_than_there_are_graphs_for_is_computed_without_drafts(
    device: torch.device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.cuda import card_drafts

    monkeypatch.setattr(card_drafts, "MOST_ROWS", 3)
    expected = texts_without_drafts(loaded, device, SAMPLED)
    known = {slot: PROMPTS[slot] + text for slot, text in expected.items()}
    drafting = CardDrafting(lambda slots: ScriptedDrafter(slots, known, 99), MAX_DRAFTS)
    runner = make_runner(loaded, device, drafting)
    runner.warm_up()
    host = Host(runner, NUM_NEW, SAMPLED, 1)
    host.begin(PROMPTS)
    num_replays = CalledGraph.num_replays
    assert host.run(dict.fromkeys(PROMPTS, 4)) == expected
    assert {count for s in host.running.values() for count in s.taken} == {1}
    if not torch.cuda.is_available():
        assert CalledGraph.num_replays > num_replays


def test_what_drafts_cannot_be_is_refused(device: torch.device, loaded: LoadedModel) -> None:
    drafting = CardDrafting(lambda slots: CardNgramDrafter(slots, MAX_DRAFTS, 2, 4), MAX_DRAFTS)
    runner, plain = make_runner(loaded, device, drafting), make_runner(loaded, device, None)
    row = Slice("0", 0, 0, 20, 3, 3, num_drafts=2)
    guessed = row._replace(token_ids=(1, 2), num_drafts=0)
    for case, refusing, message in (
        (guessed, runner, "up to 4 drafts of the runner's own"),
        (row._replace(num_tokens=6, num_sampled=6, num_drafts=5), runner, "0: 6 tokens, 6 of them"),
        (row, plain, "up to 0 drafts"),
    ):
        with pytest.raises(ValueError, match=message):
            refusing.launch(StepPlan(1, (), (), (), (case,), has_drafts=True))
    assert not plain.can_draft(GREEDY)
    assert runner.can_draft(SAMPLED)
    assert not runner.can_draft(replace(GREEDY, repetition_penalty=1.1))
    assert not runner.can_draft(replace(GREEDY, num_logprobs=2))
    with pytest.raises(ValueError, match="n-grams of 3 to 2"):
        CardNgramDrafter(runner._slots, 4, 3, 2)


@pytest.mark.parametrize(("num_slots", "max_drafts"), [(1, 1), (1, 7), (6, 4), (64, 4), (64, 7), (90, 4), (256, 7)])
def test_graphs_of_rows_with_drafts_ascend_and_waste_little(
    num_slots: int, max_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # all that there are
    shapes = draft_shapes(num_slots, max_drafts)
    few, many = min(num_slots, 80), min(num_slots, 256)
    most = min(many * (1 + max_drafts), 768)
    assert shapes[-1].num_tokens == most
    assert shapes[-1].num_rows == many
    for num_rows in range(1, many + 1):
        for num_tokens in range(num_rows + 1, min(most, num_rows * (1 + max_drafts)) + 1):
            shape = next(shape for shape in shapes if shape.holds(num_rows, num_tokens))
            assert shape.num_rows == (few if num_rows <= few and num_tokens <= 320 else min(many, shape.num_tokens))
            # Of few rows what is padding costs little; of many a third of a step, at most.
            assert shape.num_tokens <= max(num_tokens + 3, num_tokens * (1.42 if num_rows <= few else 1.5), 128)


def test_rows_attend_by_the_tiles_that_they_have_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a row's own token has the bits that it has without."""
    monkeypatch.undo()
    sharing = WorkSharing(8, 64, 64, 128, 256)
    sizes = batch_sizes(256)
    for num_rows in range(1, 257):
        plain = next(size for size in sizes if size >= num_rows)
        for num_tokens in {num_rows + 1, num_rows + 4, 3 * num_rows}:
            shape = next(shape for shape in draft_shapes(256, 4) if shape.holds(num_rows, num_tokens))
            assert sharing.tile_len(min(shape)) == sharing.tile_len(plain), num_rows


def test_graphs_are_as_many_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert draft_shapes(1, 1) == [DraftShape(1, 2)]
    assert [shape.num_tokens for shape in draft_shapes(4, 4)] == [3, 5, 8, 12, 16, 20]
    many = [shape for shape in draft_shapes(100, 2) if shape.num_rows > 80]
    assert many == [DraftShape(100, 128), DraftShape(100, 192), DraftShape(100, 288), DraftShape(100, 300)]


def test_columns_say_whose_token_each_is() -> None:
    rows = [Slice("a", 2, 5, 30, 3, 3, num_drafts=2), Slice("b", 0, 1, 9)]
    assert columns_of(rows, 3, 6, 8) == [[5, 1, 8], [30, 9, -1], [2, 0, 0], [0, 3, 0], [3, 1, 0], [0, 0, 0, 1, -1, -1]]
    assert columns_of([], 1, 2, 8) == [[8], [-1], [0], [0], [0], [-1, -1]]
    assert np.array(columns_of(rows, 3, 6, 8)[5]).dtype == np.int64


@torch.inference_mode()
def test_without_drafts_nothing_of_them_is_there(
    device: torch.device, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel, no graph, no history; rows are where plans say."""

    def unexpected(*arguments: object) -> None:
        raise AssertionError("a kernel of drafts, without drafts")

    for name in (
        "graph_passes.locate_rows",
        "card_drafts.feed_rows",
        "card_drafts.accept_drafts",
        "card_drafts.follow_tokens",
    ):
        monkeypatch.setattr(f"replicas.cuda.{name}", unexpected)
    runner = make_runner(loaded, device, None)
    runner.warm_up()
    assert runner._graphs is not None
    assert runner._graphs.most_row_tokens == 0
    assert runner._slots.history is None
    host = Host(runner, 4, GREEDY, 1)
    host.begin({slot: PROMPTS[slot] for slot in (0, 3)})
    assert all(len(text) == 4 for text in host.run({}).values())
    assert runner._slots.length.eq(-1).all()
