"""Engines on a card that draft by a model, or by an EAGLE-3 head, in float32: every text is transformers' own.

The draft model is the served one once more, whose drafts are nearly always right: so steps are saved. The head is of
random weights, whose drafts are nearly always wrong. On an H200 some 40 s for each engine, most of it the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.gpu.bare_drafts import Drafts
from benchmarks.gpu.bare_engine import BareEngine, EngineSize, TimedTokens
from benchmarks.gpu.speculative_pieces import count_drafts
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.settings import ModelSettings
from replicas.speculation.draft_loading import load_head
from scheduler.constant_drafts import ConstantDrafts
from scheduler.sampling_params import SamplingParams
from tests.golden.golden_set import Golden, load_goldens
from tests.gpu import served_texts
from tests.model_folder import CACHE_DIR, model_folder
from tests.replicas.eagle3_reference import random_tensors, save_eagle

pytestmark = pytest.mark.timeout(900)

MAX_MODEL_LEN, NUM_SLOTS, MAX_DRAFTS, BLOCK_SIZE = 1024, 32, 7, 16
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=77)
CAPACITY_TOKENS = 16_384
DEVICE = torch.device("cuda")


@cache
def goldens() -> tuple[Golden, ...]:
    """Twelve, of different lengths."""
    fitting = sorted((g for g in load_goldens() if len(g.prompt_ids) <= 700), key=lambda golden: len(golden.prompt_ids))
    return tuple(fitting[number * (len(fitting) - 1) // 11] for number in range(12))


def by_model(pool: KvPool) -> Any:
    """The bundled model drafts for itself."""
    from replicas.cuda.card_draft_model import CardDraftModel
    from replicas.cuda.card_drafts import CardDrafting
    from replicas.cuda.draft_model_runner import DraftModelRunner

    folder = model_folder()
    draft = load_model(ModelSettings(folder, str(CACHE_DIR), "float32", MAX_MODEL_LEN, "auto", False), DEVICE)
    own = KvPool(draft.kv_layout(BLOCK_SIZE), pool.num_blocks, DEVICE)
    runner = DraftModelRunner(draft, own, NUM_SLOTS, MAX_MODEL_LEN)
    runner.warm_up()
    own.tensor.fill_(torch.nan)  # nobody may look at what nobody has written
    return CardDrafting(
        lambda slots: CardDraftModel(runner, slots, MAX_MODEL_LEN, draft.vocab_size, MAX_DRAFTS), MAX_DRAFTS, False
    )


def head_folder(folder: Path, model: str) -> Path:
    """A head of random weights, of the model's shape, with a vocabulary of its own."""
    config = AutoConfig.from_pretrained(model)
    shape = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": 8000,
    }
    save_eagle(folder, shape, random_tensors(shape))
    return folder


def drafts_of(method: str, folder: Path, constant: int | None) -> Drafts:
    if method == "draft model":
        return Drafts(MAX_DRAFTS, None, by_model, constant)
    source = str(head_folder(folder / "head", model_folder()))

    def make_head(served: LoadedModel) -> Any:
        return load_head(source, served, DEVICE)

    return Drafts(MAX_DRAFTS, None, None, constant, make_head)


def make_engine(lag: int, drafts: Drafts | None, capacity_tokens: int = CAPACITY_TOKENS, hosts: int = 0) -> BareEngine:
    size = EngineSize(NUM_SLOTS, MAX_MODEL_LEN, 1024, capacity_tokens, hosts, 0.5 if hosts else None)
    return BareEngine(model_folder(), "float32", "auto", size, lag, drafts=drafts)


WAYS = {
    "model-lag0": ("draft model", 0),
    "model-lag1": ("draft model", 1),
    "eagle3-lag0": ("eagle3", 0),
    "eagle3-lag1": ("eagle3", 1),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> tuple[str, int]:
    served_texts.allow_no_rounding()
    way: tuple[str, int] = request.param
    return way


@pytest.fixture(scope="module")
def drafting(way: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareEngine]:
    method, lag = way
    engine = make_engine(lag, drafts_of(method, tmp_path_factory.mktemp("head"), 4))
    print(f"{way}: start {engine.start_s:.1f} s")
    with engine:
        yield engine
    del engine
    torch.cuda.empty_cache()


def set_drafts(engine: BareEngine, count: int) -> None:
    """From now on so many in each row."""
    planner = engine.scheduler.drafts
    assert planner is not None
    planner._speculation = replace(planner._speculation, speculator=ConstantDrafts(count))


def failed(engine: BareEngine) -> int:
    return engine.runner.num_failed_drafters


@pytest.mark.parametrize("count", [2, 4, 7])
def test_goldens(drafting: BareEngine, way: tuple[str, int], count: int) -> None:
    set_drafts(drafting, count)
    counts = count_drafts(drafting)
    some = goldens()
    for at_once in (some, some[:1]):
        before = dict(counts)
        streams = drafting.run([golden.prompt_ids for golden in at_once], [64] * len(at_once), GREEDY)
        for golden, stream in zip(at_once, streams, strict=True):
            golden.check(stream.tokens)
        new = {name: counts[name] - before[name] for name in counts}
        print(f"{way}, k {count}, {len(at_once)} at once: {ms_a_token(streams):.2f} ms a token, {new}")
    assert failed(drafting) == 0
    assert counts["drafted"] > 100
    if way[0] == "draft model":
        assert counts["held"] > 0.9 * counts["drafted"] - 8 * counts["rows"] / 64, counts


def ms_a_token(streams: Sequence[TimedTokens]) -> float:
    """Of the stream that began last, from its first token to its last."""
    times_s = max(streams, key=lambda stream: stream.times_s[0]).times_s
    return 1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def texts(engine: BareEngine, sampling: SamplingParams) -> list[list[int]]:
    prompts = [golden.prompt_ids for golden in goldens()]
    return [stream.tokens for stream in engine.run(prompts, [48] * len(prompts), sampling)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Without drafts, sampled."""
    return plain_texts()


@cache
def plain_texts() -> list[list[int]]:
    with make_engine(1, None) as plain:
        found = texts(plain, SAMPLED)
        for some in (goldens(), goldens()[:1]):
            streams = plain.run([golden.prompt_ids for golden in some], [64] * len(some), GREEDY)
            print(f"without drafts, {len(some)} at once: {ms_a_token(streams):.2f} ms a token")
    torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize("count", [2, 4, 7])
def test_sampled_texts_are_those_without_drafts(
    drafting: BareEngine, expected: list[list[int]], way: tuple[str, int], count: int
) -> None:
    """But for sums in another order, which a text in hundreds may see: no more than one does."""
    set_drafts(drafting, count)
    counts = count_drafts(drafting)
    found = texts(drafting, SAMPLED)
    print(f"{way}, k {count}, sampled: {counts}")
    assert sum(text != other for text, other in zip(found, expected, strict=True)) <= 1
    assert failed(drafting) == 0
    if way[0] == "draft model":
        assert counts["held"] > 0.8 * counts["drafted"] - 8 * counts["rows"] / 64, counts


@pytest.mark.parametrize("method", ["draft model", "eagle3"], ids=["model", "eagle3"])
def test_texts_hold_where_memory_is_short(method: str, tmp_path: Path) -> None:
    """Some give way, and come back with what they had; a draft model finds its own memory full, too."""
    served_texts.allow_no_rounding()
    with make_engine(1, drafts_of(method, tmp_path, 4), 1024, 256) as engine:
        counts = count_drafts(engine)
        some = [golden for golden in goldens() if len(golden.prompt_ids) <= 300] * 4
        engine.run([some[0].prompt_ids] * 40, [4] * 40, GREEDY)  # so that outputs look short
        lengths = [4 if number % 8 == 0 else 64 for number in range(len(some))]
        streams = engine.run([golden.prompt_ids for golden in some], lengths, GREEDY)
        for golden, length, stream in zip(some, lengths, streams, strict=True):
            cut = replace(golden, output_ids=golden.output_ids[:length], margins=golden.margins[:length])
            cut.check(stream.tokens)
        preemption = engine.scheduler.preemption
        num_preempted = preemption.num_swapped + preemption.num_evicted
        print(f"{method}, short of memory: {counts}, {num_preempted} preempted")
        assert failed(engine) == 0
        assert counts["drafted"] > 100
        assert num_preempted > 0, "nobody had to give way: nothing was tested"
