"""The CUDA runner with a draft model, and with an EAGLE-3 head: texts are those without, and drafts are those that the
same model makes on a CPU.

On a card as it is; in Triton's interpreter as `test_cuda_runner`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.settings import ModelSettings
from replicas.speculation import draft_tables
from replicas.speculation.draft_loading import load_head
from replicas.speculation.drafter import DraftRow
from scheduler.plan import RuleContext, SlotInit
from scheduler.sampling_params import SamplingParams
from tests.gpu.test_cuda_runner import CONFIG, card  # noqa: F401 - a fixture
from tests.replicas.eagle3_reference import Reference, config_of, random_tensors, save_eagle

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import captured_loops, card_draft_model, card_eagle3, draft_loop, eagle3_card_runner
from replicas.cuda.card_draft_model import CardDraftModel
from replicas.cuda.card_drafts import CardDrafting
from replicas.cuda.card_eagle3 import CardEagle3
from replicas.cuda.draft_model_runner import DraftModelRunner
from replicas.cuda.eagle3_card_runner import Eagle3CardRunner
from replicas.cuda.runner import CudaRunner
from replicas.cuda.slots import CudaSlots
from tests.gpu.test_cuda_runner import CalledGraph
from tests.gpu.test_speculative_runner import (
    BLOCKS_A_SLOT,
    GREEDY,
    SAMPLED,
    Host,
    few_graphs,  # noqa: F401 - a fixture
    make_prompt_dependent,
)

pytestmark = pytest.mark.interpreted

SHAPE = CONFIG | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
NUM_LAYERS, LAYER_IDS = 2, (0, 1, 2)
# Small, as the interpreter takes its time.
NUM_SLOTS, MAX_LEN, MAX_DRAFTS, NUM_NEW = 2, 16 * BLOCKS_A_SLOT, 2, 7
PROMPTS = {0: [7, 8, 9, 10] * 2, 1: [*range(20, 29)]}
HEAD = config_of(hidden_size=64, num_heads=2, num_kv_heads=1, vocab_size=300, draft_vocab_size=120)


class LazyGraph(CalledGraph):
    """As its base, but that capturing computes nothing: of the interpreter's time that would be most."""

    def __init__(self, static_input: torch.Tensor, run: Any, pool: Any, stream: Any) -> None:
        self._input, self._run = static_input, run


class StaticGraph(CalledGraph):
    """As its base, but that what a pass gives is always in the same memory."""

    def __init__(self, static_input: torch.Tensor, run: Any, pool: Any, stream: Any) -> None:
        self._input, self._run, self.given = static_input, run, run()

    def repeat(self) -> Any:
        copy_into(self.given, super().repeat())
        return self.given


def copy_into(kept: Any, new: Any) -> None:
    if isinstance(kept, torch.Tensor):
        kept.copy_(new)
    elif isinstance(kept, tuple):
        for one, other in zip(kept, new, strict=True):
            copy_into(one, other)
    elif is_dataclass(kept):
        for item in fields(kept):
            copy_into(getattr(kept, item.name), getattr(new, item.name))


@pytest.fixture(autouse=True)
def few_loops(few_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for module in (card_draft_model, card_eagle3):
        monkeypatch.setattr(module, "_ROWS", ())
    monkeypatch.setattr(captured_loops, "DRAFT_COUNTS", ())
    if not torch.cuda.is_available():
        for module in (captured_loops, card_draft_model, eagle3_card_runner):
            monkeypatch.setattr(module, "StepGraph", LazyGraph)
        monkeypatch.setattr("replicas.cuda.graphs.StepGraph", StaticGraph)
    monkeypatch.setattr("replicas.cuda.draft_model_runner._CHUNKS", (16,))


def load(folder: Path, num_layers: int) -> LoadedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
    loaded = load_model(ModelSettings(str(folder), str(folder), "float32", 256, "dummy", False), device)
    make_prompt_dependent(loaded)
    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    """In float32: in the interpreter products of 16 bits take nearly all of the time."""
    return load(folder / "served", 1)


@pytest.fixture(scope="module")
def same(folder: Path) -> LoadedModel:
    """The served model once more: as a draft model it is always right."""
    return load(folder / "same", 1)


@pytest.fixture(scope="module")
def other(folder: Path) -> LoadedModel:
    """One that knows less."""
    return load(folder / "other", 2)


def draft_runner(
    draft: LoadedModel, device: torch.device, num_blocks: int = NUM_SLOTS * BLOCKS_A_SLOT
) -> DraftModelRunner:
    runner = DraftModelRunner(draft, KvPool(draft.kv_layout(16), num_blocks, device), NUM_SLOTS, MAX_LEN)
    runner.warm_up()
    runner.pool.tensor.fill_(torch.nan)  # nobody may look at what nobody has written
    return runner


def by_model(
    draft: LoadedModel,
    made: list[CardDraftModel],
    max_len: int = MAX_LEN,
    num_blocks: int = NUM_SLOTS * BLOCKS_A_SLOT,
) -> CardDrafting:
    def make(slots: CudaSlots) -> CardDraftModel:
        runner = draft_runner(draft, slots.state.device, num_blocks)
        made.append(CardDraftModel(runner, slots, max_len, 300, MAX_DRAFTS))
        return made[0]

    return CardDrafting(make, MAX_DRAFTS, is_told=False)


def make_runner(loaded: LoadedModel, device: torch.device, drafting: CardDrafting | None) -> CudaRunner:
    pool = KvPool(loaded.kv_layout(16), NUM_SLOTS * BLOCKS_A_SLOT + 1, device)
    return CudaRunner(loaded, pool, NUM_SLOTS, MAX_LEN, drafting=drafting)


def plain_texts(
    loaded: LoadedModel, device: torch.device, sampling: SamplingParams, num_new: int = NUM_NEW
) -> dict[int, list[int]]:
    host = Host(make_runner(loaded, device, None), num_new, sampling, 0)
    host.begin(PROMPTS)
    texts = host.run({})
    assert texts[0] != texts[1]
    return texts


@torch.inference_mode()
@pytest.mark.parametrize(("sampling", "lag"), [(GREEDY, 0), (SAMPLED, 1)], ids=["greedy", "sampled"])
def test_a_model_that_drafts_for_itself_is_always_right(
    device: torch.device, loaded: LoadedModel, same: LoadedModel, lag: int, sampling: SamplingParams
) -> None:
    """With the served model's own noise, too; also where a step is in flight."""
    expected = plain_texts(loaded, device, sampling)
    made: list[CardDraftModel] = []
    runner = make_runner(loaded, device, by_model(same, made))
    host = Host(runner, NUM_NEW, sampling, lag)
    host.begin(PROMPTS)
    assert host.run({0: 2, 1: 1}) == expected
    # A token by its prompt; the last step may be short.
    assert [host.running[slot].taken for slot in (0, 1)] == [[1, 3, 3], [1, 2, 2, 2]]
    assert made[0].counts.undrafted == {"no_blocks": 0, "catching_up": 0, "beyond_reach": 0}
    assert made[0].counts.prompt_tokens == sum(map(len, PROMPTS.values()))


@torch.inference_mode()
@pytest.mark.parametrize("is_warm", [True, False], ids=["graphs", "by hand"])
def test_texts_are_those_without_a_draft_model_that_errs(
    device: torch.device, loaded: LoadedModel, other: LoadedModel, is_warm: bool
) -> None:
    expected = plain_texts(loaded, device, SAMPLED)
    runner = make_runner(loaded, device, by_model(other, []))
    if is_warm:
        runner.warm_up()
    host = Host(runner, NUM_NEW, SAMPLED, 1)
    host.begin(PROMPTS)
    assert host.run({0: 2, 1: 1}) == expected
    assert runner.num_failed_drafters == 0
    assert sum(host.running[0].taken) < 3 * len(host.running[0].taken) - 2, "it does err"


def paused(runner: CudaRunner, num_new: int) -> Host:
    """A row has had drafts once, and none in 18 steps since."""
    host = Host(runner, num_new, GREEDY, 0)
    host.begin({0: PROMPTS[0]})
    host.step({0: 2})
    for _ in range(18):
        host.step({0: 0})
    return host


@torch.inference_mode()
def test_who_was_not_drafted_for_is_caught_up_with(
    device: torch.device, loaded: LoadedModel, same: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By passes of many tokens, in front of the first drafts: which are right at once."""
    num_new = 28
    expected = plain_texts(loaded, device, GREEDY, num_new)
    host = paused(make_runner(loaded, device, by_model(same, [])), num_new)
    numbers: list[int] = []
    original = CardDraftModel._num_catch_ups

    def spied(drafter: CardDraftModel, rows: Sequence[DraftRow]) -> int:
        numbers.append(original(drafter, rows))
        return numbers[-1]

    monkeypatch.setattr(CardDraftModel, "_num_catch_ups", spied)
    assert host.run({0: 2})[0] == expected[0]
    assert host.running[0].taken == [1, 3, *[1] * 18, 3, 3]
    assert numbers == [2, 0]


@torch.inference_mode()
def test_who_has_paused_for_long_comes_back_over_some_steps(
    device: torch.device, loaded: LoadedModel, same: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than one step reads on: what it leaves unread the next ones do."""
    for module in (draft_loop, card_draft_model):
        monkeypatch.setattr(module, "CATCH_UP", 4)
    monkeypatch.setattr(card_draft_model, "_MOST_CATCH_UPS", 2)
    num_new = 30
    expected = plain_texts(loaded, device, GREEDY, num_new)
    host = paused(make_runner(loaded, device, by_model(same, [])), num_new)
    assert host.run({0: 2})[0] == expected[0]
    assert host.running[0].taken[20:] == [1, 1, 3, 3]  # the first two are still behind


@torch.inference_mode()
def test_who_has_lost_its_blocks_is_read_anew_to_its_end(
    device: torch.device, loaded: LoadedModel, same: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer too, however lately it was drafted for."""
    monkeypatch.setattr(draft_tables, "IDLE_TURNS", 1)
    made: list[CardDraftModel] = []
    expected = plain_texts(loaded, device, GREEDY, 28)
    runner = make_runner(loaded, device, by_model(same, made, num_blocks=3))
    host = Host(runner, 28, GREEDY, 0)
    host.begin({0: PROMPTS[0]})
    for _ in range(6):
        host.step({0: 2})
    host.begin({1: [*range(20, 42)]})
    host.step({1: 2})
    assert [len(made[0]._tables.table(slot)) for slot in (0, 1)] == [0, 2], "of three"
    assert host.run({0: 2})[0] == expected[0]
    assert host.running[0].taken == [1, *[3] * 6, *[3] * 3]


@torch.inference_mode()
def test_a_prompt_that_is_expected_is_read_before(
    device: torch.device, loaded: LoadedModel, same: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts; nothing of it is read again when its sequence is here. Another sequence's in that slot is."""
    monkeypatch.setattr(card_draft_model, "PROMPT_TOKENS", 5)
    made: list[CardDraftModel] = []
    runner = make_runner(loaded, device, by_model(same, made))
    prompt, other = tuple(PROMPTS[0]), tuple(PROMPTS[1])
    runner.expect(0, prompt)
    parts = []
    while runner.read_ahead():
        parts.append(made[0].counts.prompt_tokens)
    assert parts == [5, 8]
    for ids, read in ((prompt, 8), (other, 8 + 9)):
        made[0].start(SlotInit(0, 0, GREEDY, None, RuleContext(ids, len(ids)), may_draft=True))
        row = [DraftRow(0, 0, 2, len(ids))]
        while made[0].draft(row).shape[1] == 0:
            pass
        assert made[0].counts.prompt_tokens == read


@torch.inference_mode()
def test_what_a_draft_model_cannot_reach_has_no_drafts(
    device: torch.device, loaded: LoadedModel, same: LoadedModel
) -> None:
    """Positions beyond its own, and prompts that are longer."""
    made: list[CardDraftModel] = []
    expected = plain_texts(loaded, device, GREEDY)
    runner = make_runner(loaded, device, by_model(same, made, max_len=12))
    host = Host(runner, NUM_NEW, GREEDY, 0)
    host.begin(PROMPTS)
    assert host.run({0: 2, 1: 2}) == expected
    assert host.running[0].taken[1] == 3
    assert host.running[0].taken[-1] == 1
    assert made[0].counts.beyond_reach > 0


# -- EAGLE-3 -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looked_into(folder: Path) -> Path:
    """A model of transformers' own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "looked_into")
    return folder / "looked_into"


def load_looked_into(source: Path, device: torch.device) -> LoadedModel:
    return load_model(ModelSettings(str(source), str(source), "float32", 256, "auto", False), device)


class SpiedEagle3(CardEagle3):
    """Notes what it drafts, and behind which position."""

    made: list[tuple[int, int, list[int]]]

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        lengths = self.head.slots.length[[row.slot for row in rows]].tolist()
        drafts = super().draft(rows)
        for row, length, found in zip(rows, lengths, drafts.tolist(), strict=True):
            self.made.append((row.slot, length, found[: row.num_drafts]))
        return drafts


def eagle_runner(source: Path, head_folder: Path, device: torch.device) -> tuple[Eagle3CardRunner, SpiedEagle3]:
    loaded = load_looked_into(source, device)
    head = load_head(str(head_folder), loaded, device)
    layout = replace(loaded.kv_layout(16), num_extra_layers=1)
    pool = KvPool(layout, NUM_SLOTS * BLOCKS_A_SLOT + 1, device)
    made: list[SpiedEagle3] = []

    def make(slots: CudaSlots) -> SpiedEagle3:
        made.append(SpiedEagle3(head, pool, slots, MAX_DRAFTS))
        made[0].made = []
        return made[0]

    drafting = CardDrafting(make, MAX_DRAFTS, is_told=False)
    return Eagle3CardRunner(loaded, pool, NUM_SLOTS, MAX_LEN, drafting=drafting), made[0]


@pytest.fixture(scope="module")
def head_folder(folder: Path) -> Path:
    save_eagle(folder / "head", HEAD | {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS)}, random_tensors(HEAD))
    return folder / "head"


def states_of(model: Any, ids: list[int]) -> torch.Tensor:
    """By transformers alone: what is in front of the layers that the head looks at, and behind the last one."""
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, arguments, output: last.append(output))
    hidden = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    states = (*hidden[:-1], last[0])
    return torch.cat([states[layer_id][0] for layer_id in LAYER_IDS], dim=1)


@torch.inference_mode()
@pytest.mark.parametrize(("is_warm", "lag"), [(True, 1), (False, 0)], ids=["graphs", "by hand"])
def test_a_heads_drafts_are_those_of_its_publication(
    device: torch.device, looked_into: Path, head_folder: Path, lag: int, is_warm: bool
) -> None:
    """Behind prompts and rows, with right and wrong drafts: what the head has of a sequence is right every time. And
    the texts are those without."""
    expected = plain_texts(load_looked_into(looked_into, device), device, GREEDY)
    runner, drafter = eagle_runner(looked_into, head_folder, device)
    if is_warm:
        runner.warm_up()
    runner.pool.tensor.fill_(torch.nan)  # nobody may look at what nobody has written
    host = Host(runner, NUM_NEW, GREEDY, lag)
    host.begin(PROMPTS)
    assert host.run({0: 2, 1: 1}) == expected
    assert runner.num_failed_drafters == 0
    alone: Any = AutoModelForCausalLM.from_pretrained(looked_into, dtype=torch.float32).eval()
    reference = Reference(HEAD, random_tensors(HEAD))
    assert {slot for slot, _, _ in drafter.made} == {0, 1}
    for slot, length, drafts in drafter.made:
        ids = host.running[slot].tokens[: length + 1]
        if len(ids) == length + 1 and drafts:  # a step in flight may lie beyond the end
            assert drafts == reference.drafts(states_of(alone, ids[:-1]), ids, len(drafts)), (slot, length)
