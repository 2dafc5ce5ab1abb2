"""A draft model: what it drafts the served model accepts, as far as it can, and no text is another with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.speculation import draft_model, draft_tables
from replicas.speculation.draft_model import DraftModel
from replicas.speculation.drafting_runner import DraftingRunner
from replicas.speculation.history import TokenHistory
from scheduler.plan import RuleContext, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model, tiny_settings

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_LEN = 64
NUM_SLOTS = 6
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((31 * i + 5) % 512 for i in range(10))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def first_layer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model without its last layer: a draft that is right now and then."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    path = tmp_path_factory.mktemp("first layer")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def near(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model with other weights by a little: a draft that is mostly right."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("near")
    model.save_pretrained(path)
    return path


def load(folder: Path) -> LoadedModel:
    return load_model(tiny_settings("decode", folder).model, CPU)


@pytest.fixture(scope="module")
def served(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module")
def drafts_of(folder: Path, first_layer: Path, near: Path) -> dict[str, LoadedModel]:
    return {"self": load(folder), "near": load(near), "first layer": load(first_layer)}


def make_runner(loaded: LoadedModel, num_blocks: int = 96) -> ModelRunner:
    return ModelRunner(loaded, KvPool(loaded.kv_layout(BLOCK_SIZE), num_blocks, CPU), NUM_SLOTS, MAX_LEN)


@dataclass
class Drafted:
    """A served model with a draft, and each sequence so far. accepted, drafted: by slot, of each step."""

    target: DraftingRunner
    drafts: DraftModel
    ids: dict[int, list[int]] = field(default_factory=dict)
    prompt_len: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    drafted: dict[int, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(served: LoadedModel, draft: LoadedModel, num_blocks: int = 96, max_len: int = MAX_LEN) -> Drafted:
        made: list[DraftModel] = []

        def make(history: TokenHistory) -> DraftModel:
            runner = make_runner(draft, num_blocks)
            made.append(DraftModel(runner, history, max_len, draft.vocab_size, served.vocab_size))
            return made[0]

        pool = KvPool(served.kv_layout(BLOCK_SIZE), 96, CPU)
        target = DraftingRunner(served, pool, NUM_SLOTS, MAX_LEN, make_drafter=make)
        return Drafted(target, made[0])

    def begin(self, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, slots: Sequence[int] = (0,)) -> None:
        """Choice i in the i-th slot."""
        context = RuleContext(prompt, len(prompt))
        for choice, slot in enumerate(slots):
            init = SlotInit(slot, choice, sampling, None, context, may_draft=True)
            table = TableWrite(slot, 0, tuple(range(16 * slot, 16 * slot + 16)))
            chunk = Slice.of_prompt(f"r{slot}", slot, 0, prompt, (SampleTarget(slot, choice),))
            (token,) = self.target.launch(StepPlan(0, (init,), (table,), (), (chunk,))).result().tokens
            self.ids[slot] = [*prompt, token.token_id]
            self.prompt_len[slot] = len(prompt)
            self.accepted[slot], self.drafted[slot] = [], []

    def step(self, num_drafts: int, rows: dict[int, int], num_tokens: int) -> None:
        """rows: choice by slot. A sequence that is long enough does nothing."""
        slices = []
        for slot, choice in rows.items():
            missing = self.prompt_len[slot] + num_tokens - len(self.ids[slot])
            if missing > 0:
                most = min(num_drafts, missing - 1)
                start = len(self.ids[slot]) - 1
                slices.append(Slice(f"r{slot}", choice, slot, start, 1 + most, 1 + most, num_drafts=most))
        if not slices:
            return
        output = self.target.launch(StepPlan(1, (), (), (), tuple(slices), has_drafts=True)).result()
        counted = {accepted.request_id: accepted for accepted in output.accepted}
        for part in slices:
            tokens = [token.token_id for token in output.tokens if token.request_id == part.request_id]
            self.ids[part.slot] += tokens
            self.accepted[part.slot].append(len(tokens) - 1)
            self.drafted[part.slot].append(counted[part.request_id].num_drafted if part.num_drafts else 0)

    def run(self, num_drafts: int, num_tokens: int, rows: dict[int, int]) -> None:
        while any(len(self.ids[slot]) < self.prompt_len[slot] + num_tokens for slot in rows):
            self.step(num_drafts, rows, num_tokens)

    def output(self, slot: int = 0) -> list[int]:
        return self.ids[slot][self.prompt_len[slot] :]


def text(
    served: LoadedModel, sampling: SamplingParams, num_tokens: int, choice: int = 0, prompt: tuple[int, ...] = PROMPT
) -> list[int]:
    """Without drafts."""
    runner = make_runner(served)
    init = SlotInit(0, choice, sampling, None, RuleContext(prompt, len(prompt)))
    chunk = Slice.of_prompt("r", 0, 0, prompt, (SampleTarget(0, choice),))
    plan = StepPlan(0, (init,), (TableWrite(0, 0, tuple(range(16))),), (), (chunk,))
    ids = [runner.launch(plan).result().tokens[0].token_id]
    while len(ids) < num_tokens:
        row = Slice("r", choice, 0, len(prompt) + len(ids) - 1)
        ids.append(runner.launch(StepPlan(1, (), (), (), (row,))).result().tokens[0].token_id)
    return ids


PARAMETERS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0, seed=5),
    "filtered": SamplingParams(temperature=0.8, seed=6, top_k=40, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(
        temperature=0.7, seed=7, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2
    ),
    "biased": SamplingParams(temperature=0.9, seed=8, logit_bias=((17, 4.0), (400, -100.0))),
    "scored": SamplingParams(temperature=1.0, seed=5, num_logprobs=3),
}


@pytest.mark.parametrize(
    ("parameters", "num_drafts"),
    [("greedy", 2), ("sampled", 7), ("filtered", 4), ("penalised", 4), ("biased", 7)],
)
def test_a_draft_of_equal_weights_is_always_right(
    served: LoadedModel, drafts_of: dict[str, LoadedModel], parameters: str, num_drafts: int
) -> None:
    """Same noise, same parameters, same rules: not one of its drafts is rejected, at any temperature."""
    sampling = PARAMETERS[parameters]
    drafted = Drafted.of(served, drafts_of["self"])
    drafted.begin(PROMPT, sampling)
    drafted.run(num_drafts, 16, {0: 0})
    assert drafted.output() == text(served, sampling, 16)
    assert drafted.drafted[0][0] == num_drafts
    assert drafted.accepted[0] == drafted.drafted[0]


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ("greedy", "near"), ("sampled", "first layer"), ("penalised", "near"), ("scored", "near"),
    ],
)  # fmt: skip
def test_other_weights_change_no_text(
    served: LoadedModel, drafts_of: dict[str, LoadedModel], parameters: str, name: str
) -> None:
    """Whatever it drafts, right and wrong: both occur."""
    sampling = PARAMETERS[parameters]
    drafted = Drafted.of(served, drafts_of[name])
    drafted.begin(PROMPT, sampling)
    drafted.run(4, 24, {0: 0})
    assert drafted.output() == text(served, sampling, 24)
    assert 0 < sum(drafted.accepted[0]) < sum(drafted.drafted[0])


@pytest.mark.parametrize(("name", "num_drafts"), [("near", 2), ("first layer", 4)])
def test_as_many_are_accepted_as_by_transformers(
    monkeypatch: pytest.MonkeyPatch,
    served: LoadedModel,
    drafts_of: dict[str, LoadedModel],
    folder: Path,
    near: Path,
    first_layer: Path,
    name: str,
    num_drafts: int,
) -> None:
    """Greedy, step by step, on some prompts: its assisted generation with the same two models."""
    matches: list[int] = []
    monkeypatch.setattr(
        AssistedCandidateGenerator, "update_candidate_strategy", lambda self, ids, scores, num: matches.append(int(num))
    )
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    assistant = AutoModelForCausalLM.from_pretrained({"near": near, "first layer": first_layer}[name]).eval()
    assistant.generation_config.num_assistant_tokens = num_drafts
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    for model in (target, assistant):
        model.generation_config.eos_token_id = None
    for number in range(2):
        prompt = tuple(3 + (number * 97 + 13 * i) % 500 for i in range(6 + 3 * number))
        drafted = Drafted.of(served, drafts_of[name])
        drafted.begin(prompt)
        first = drafted.output()
        drafted.run(num_drafts, 20, {0: 0})
        matches.clear()
        ids = torch.tensor([[*prompt, *first]])  # it would draft for the first token, too
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, max_new_tokens=19, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert drafted.ids[0] == text[0].tolist()
        assert drafted.accepted[0] == matches
        assert sum(matches) > 0


def test_sampled_drafts_hold_more_often_than_the_likeliest_tokens(
    served: LoadedModel, drafts_of: dict[str, LoadedModel]
) -> None:
    """At a temperature of 1 the draft's own draw is the target's far more often than the draft's best token is."""
    rates = {}
    for likeliest in (False, True):
        accepted = drafted_in_all = 0
        for seed in range(2):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            drafted = Drafted.of(served, drafts_of["near"])
            drafted.begin(PROMPT, sampling)
            if likeliest:
                drafted.drafts.start(SlotInit(0, 0, GREEDY, None, RuleContext(PROMPT, len(PROMPT))))
            drafted.run(2, 30, {0: 0})
            accepted += sum(drafted.accepted[0])
            drafted_in_all += sum(drafted.drafted[0])
        rates[likeliest] = accepted / drafted_in_all
    assert rates[False] > 0.6
    assert rates[True] < 0.5 * rates[False]


def test_sequences_beside_each_other_that_end_and_begin(served: LoadedModel, drafts_of: dict[str, LoadedModel]) -> None:
    """Rows of unlike lengths and numbers of drafts; a slot that another sequence takes has nothing of the last one."""
    prompts = {slot: tuple((slot * 97 + 13 * i) % 512 for i in range(5 + 7 * slot)) for slot in range(4)}
    sampling = {slot: SamplingParams(temperature=0.3 * slot, seed=slot) for slot in range(4)}
    drafted = Drafted.of(served, drafts_of["near"])
    for slot in range(3):
        drafted.begin(prompts[slot], sampling[slot], [slot])
    for number in range(12):
        drafted.step(2 + number % 4, {0: 0, 1: 0, 2: 0} if number % 3 else {2: 0, 0: 0}, 20)
    drafted.run(3, 20, {0: 0, 1: 0, 2: 0})
    for slot in range(3):
        assert drafted.output(slot) == text(served, sampling[slot], 20, prompt=prompts[slot])
    drafted.begin(prompts[3], sampling[3], [1])
    drafted.run(5, 20, {1: 0})
    assert drafted.output(1) == text(served, sampling[3], 20, prompt=prompts[3])
    assert sum(drafted.accepted[1]) > 0


def test_choices_of_a_request_share_the_work_on_its_prompt(
    served: LoadedModel, drafts_of: dict[str, LoadedModel]
) -> None:
    prompt = tuple((7 * i + 3) % 512 for i in range(22))  # its last block is not full
    sampling = SamplingParams(temperature=1.0, seed=3)
    drafted = Drafted.of(served, drafts_of["self"])
    drafted.begin(prompt, sampling, slots=(4, 1, 3))
    drafted.step(3, {4: 0, 1: 1, 3: 2}, 20)
    assert [drafted.drafted[slot] for slot in (4, 1, 3)] == [[3], [0], [0]], "the others wait for the first one"
    drafted.step(3, {4: 0, 1: 1, 3: 2}, 20)
    assert [drafted.drafted[slot][1] for slot in (4, 1, 3)] == [3, 3, 3]
    assert drafted.drafts.counts.prompt_tokens < 2 * len(prompt)
    drafted.run(3, 20, {4: 0, 1: 1, 3: 2})
    for choice, slot in enumerate((4, 1, 3)):
        assert drafted.output(slot) == text(served, sampling, 20, choice, prompt)
        assert drafted.accepted[slot] == drafted.drafted[slot]
    assert len({tuple(drafted.output(slot)) for slot in (4, 1, 3)}) == 3


def test_a_long_prompt_is_read_over_some_steps(
    monkeypatch: pytest.MonkeyPatch, served: LoadedModel, drafts_of: dict[str, LoadedModel]
) -> None:
    """Beside a neighbour whose drafts go on."""
    monkeypatch.setattr(draft_model, "PROMPT_TOKENS", 8)
    prompt = tuple((7 * i + 3) % 512 for i in range(30))
    drafted = Drafted.of(served, drafts_of["self"])
    drafted.begin(PROMPT, slots=[0])
    drafted.run(2, 8, {0: 0})
    drafted.begin(prompt, slots=[1])
    for _ in range(8):
        drafted.step(2, {0: 0, 1: 0}, 30)
    assert drafted.drafted[1] == [0, 0, 0, 0, 0, 2, 2, 2], "two tokens of each step are the neighbour's"
    assert drafted.drafts.counts.catching_up > 0
    assert 0 not in drafted.drafted[0][-7:-1], "before the last token, which needs none"
    drafted.run(2, 30, {0: 0, 1: 0})
    assert drafted.output(0) == text(served, GREEDY, 30)
    assert drafted.output(1) == text(served, GREEDY, 30, prompt=prompt)


def test_a_prompt_is_read_while_its_kv_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, served: LoadedModel, drafts_of: dict[str, LoadedModel]
) -> None:
    """When nothing else is to be computed, or beside what is: its first row has drafts, and nothing is read twice."""
    monkeypatch.setattr(draft_model, "PROMPT_TOKENS", 16)
    first, second = (tuple((step * i + 3) % 512 for i in range(22)) for step in (7, 5))
    drafted = Drafted.of(served, drafts_of["self"])
    assert not drafted.target.read_ahead()
    drafted.begin(PROMPT, slots=[4])
    drafted.target.expect(0, first)
    assert [drafted.target.read_ahead() for _ in range(3)] == [True, True, False]
    drafted.begin(first, slots=[0])
    drafted.target.expect(1, second)
    drafted.run(3, 12, {0: 0, 4: 0})
    drafted.begin(second, slots=[1])
    drafted.run(3, 12, {1: 0})
    for slot, prompt in ((0, first), (1, second), (4, PROMPT)):
        assert drafted.output(slot) == text(served, GREEDY, 12, prompt=prompt)
        assert drafted.accepted[slot] == drafted.drafted[slot]
    assert drafted.drafted[0][0] == drafted.drafted[1][0] == 3
    drafted.target.expect(2, first)  # it never comes, and another sequence takes the slot
    drafted.target.read_ahead()
    drafted.begin(second, slots=[2])
    drafted.run(3, 12, {2: 0})
    assert drafted.output(2) == drafted.output(1)
    assert drafted.accepted[2] == drafted.drafted[2]


def test_a_row_without_room_has_no_drafts(served: LoadedModel, drafts_of: dict[str, LoadedModel]) -> None:
    """And gets some as soon as the other sequence is over."""
    drafted = Drafted.of(served, drafts_of["self"], num_blocks=12)
    other = tuple((7 * i + 3) % 512 for i in range(30))
    drafted.begin(PROMPT, slots=[0])
    drafted.begin(other, slots=[1])
    for _ in range(4):
        drafted.step(3, {0: 0, 1: 0}, 20)
    assert drafted.drafts.counts.no_blocks > 0
    assert drafted.accepted[0] == drafted.drafted[0] == [3, 3, 3, 3]
    assert drafted.drafted[1][-1] == 0
    drafted.run(3, 20, {0: 0})
    assert drafted.output(0) == text(served, GREEDY, 20)
    for _ in range(draft_tables.IDLE_TURNS):
        drafted.drafts.draft([])
    drafted.run(3, 14, {1: 0})
    assert drafted.output(1) == text(served, GREEDY, 14, prompt=other)
    assert drafted.accepted[1] == drafted.drafted[1]
    assert drafted.drafted[1][4] == 3


def test_rejected_drafts_leave_no_block_behind(served: LoadedModel, drafts_of: dict[str, LoadedModel]) -> None:
    """A pool that holds just what the longest sequences need."""
    num_blocks = -(-(len(PROMPT) + 20) // BLOCK_SIZE)
    drafted = Drafted.of(served, drafts_of["first layer"], num_blocks)
    for _ in range(2):
        drafted.begin(PROMPT, PARAMETERS["sampled"], [0])
        drafted.run(7, 20, {0: 0})
    assert drafted.output() == text(served, PARAMETERS["sampled"], 20)
    assert drafted.drafts.counts.no_blocks == 0


@pytest.mark.parametrize("change", [8, -8])
def test_a_table_of_another_size(served: LoadedModel, folder: Path, tmp_path: Path, change: int) -> None:
    """Models of one family pad their tables unlike: what only one of them has is never drafted, and breaks nothing."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(512 + change, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[512:] = 10.0  # what would be likely
    model.save_pretrained(tmp_path)
    sampling = SamplingParams(temperature=1.0, seed=5, logit_bias=((511, 5.0),))
    drafted = Drafted.of(served, load(tmp_path))
    prompt = (*PROMPT, 511)
    for slot, ids in enumerate((PROMPT, prompt)):
        drafted.begin(ids, sampling, [slot])
    drafted.run(4, 30, {0: 0, 1: 0})
    for slot, ids in enumerate((PROMPT, prompt)):
        assert drafted.output(slot) == text(served, sampling, 30, prompt=ids)
    if change > 0:
        assert drafted.accepted[1] == drafted.drafted[1]
    else:
        assert sum(drafted.drafted[1]) == 0
        assert drafted.drafts.counts.beyond_reach > 0
    assert sum(drafted.accepted[0]) > 0


def test_a_sequence_beyond_its_positions(served: LoadedModel, drafts_of: dict[str, LoadedModel]) -> None:
    drafted = Drafted.of(served, drafts_of["self"], max_len=24)
    drafted.begin(PROMPT)
    drafted.run(4, 30, {0: 0})
    assert drafted.output() == text(served, GREEDY, 30)
    lengths = np.cumsum([len(PROMPT) + 1, *[1 + count for count in drafted.accepted[0]]])
    assert [bool(count) for count in drafted.drafted[0]] == [length < 24 for length in lengths[:-1]]
