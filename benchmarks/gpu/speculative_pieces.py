"""python -m benchmarks.gpu.speculative_pieces PIECE --shape FILE: ms a token, with drafts and without, on a card.

Of a model whose text is known (`walking_model`), without a server: the bare engine, and vLLM's offline class. Each
figure is the time of a run less that of the same prompts with one token each, by tokens: so what prompts take is in
neither. Of both the shortest of some: the host launches many prompts by hand, and takes up to twice as long for it in
some seconds as in others, which was once taken for what drafts cost. Prints one JSON line, last.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.piece_command import Piece, run_named
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.walking_model import AHEAD, followers, make_walk, start_of_new, walk
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:  # vLLM's process has nothing of them
    from benchmarks.gpu.bare_drafts import Drafts
    from benchmarks.gpu.bare_engine import BareEngine

MAX_DRAFTS = 4
# As an EAGLE-3 head's drafts are reported to hold, each if those in front of it do.
_HOLDING = (0.7, 0.6, 0.5, 0.4)
_DRAFT_VOCABULARY = 32_000
_MAX_MODEL_LEN = 1024
_REPEATS = 3
_VLLM_NGRAMS = {
    "method": "ngram", "num_speculative_tokens": MAX_DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 2
}  # fmt: skip

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, bool], float]  # prompts, tokens of each, whether at temperature 1: seconds


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """No drafts: nothing of them is there."""
    return _measured(options, _engine(options, None), all_texts)


def ngram(options: argparse.Namespace) -> dict[str, Any]:
    """N-grams: as many drafts as pay; then always MAX_DRAFTS; then none, over the same runner."""
    engine = _engine(options, ngram_drafts(None))
    found = _measured(options, engine, all_texts)
    for name, drafts in (("always", ngram_drafts(MAX_DRAFTS)), ("none", None)):
        beside = _measured(
            options, engine.beside(None, drafts), partial(_texts, texts=("repeat", "new"), batches=(1, 16))
        )
        found |= {f"{name}_{key}": value for key, value in beside.items()}
    return found


def oracle(options: argparse.Namespace, *, is_fp8: bool = False) -> dict[str, Any]:
    """Drafts that hold as often as EAGLE's are said to, at what such a head's products cost: of weights in bfloat16,
    or rounded to 8 bits. With as many drafts as pay; then with always so many."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    from benchmarks.gpu.bare_drafts import Drafts

    def drafts(constant: int | None) -> Drafts:
        return Drafts(MAX_DRAFTS, None, lambda _: _oracle(options, is_fp8), constant)

    engine = _engine(options, drafts(None))
    measure = partial(_texts, texts=("repeat",), batches=(1, 16, 64))
    found = _measured(options, engine, measure)
    for constant in (3, 4):
        beside = _measured(options, engine.beside(None, drafts(constant)), measure)
        found |= {f"always_{constant}_{key}": value for key, value in beside.items()}
    return found


def eagle3(options: argparse.Namespace) -> dict[str, Any]:
    """A head of random weights: what it costs, ms a token with nothing that holds; then with nothing drafted."""
    from benchmarks.gpu.bare_drafts import Drafts
    from benchmarks.gpu.random_head import random_head

    if options.device != "cuda":
        return {"skipped": "needs a card"}
    size = min(_DRAFT_VOCABULARY, _vocab_size(options) // 2)

    def drafts(constant: int) -> Drafts:
        return Drafts(MAX_DRAFTS, None, None, constant, lambda served: random_head(served, size))

    engine = _engine(options, drafts(MAX_DRAFTS))
    measure = partial(_texts, texts=("repeat",), batches=(1, 16, 64))
    found = _measured(options, engine, measure)
    beside = _measured(options, engine.beside(None, drafts(0)), measure)
    return found | {f"none_{key}": value for key, value in beside.items()}


def vllm(drafting: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's offline class. Not twice in one process: the second takes the memory that the first one gives back for
    somebody else's, and refuses to start."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    with tempfile.TemporaryDirectory() as folder:
        made = make_shape_folder(options.shape, Path(folder))
        return all_texts(options, VllmWalk(str(made), _vocab_size(options), drafting).generate)


class VllmWalk:
    """vLLM's offline class, all in this process: its weights are changed once it has loaded them."""

    def __init__(self, folder: str, vocab_size: int, drafting: dict[str, Any] | None) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._vllm: Any = import_module("vllm")  # it is in no environment of ours
        self._llm: Any = self._vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=_MAX_MODEL_LEN,
            enable_prefix_caching=False, max_num_seqs=256, gpu_memory_utilization=0.45,
            **({"speculative_config": drafting} if drafting else {}),
        )  # fmt: skip
        self._llm.apply_model(lambda model: make_walk(model, vocab_size))

    def generate(self, prompts: Prompts, num_tokens: int, is_sampled: bool) -> float:
        params = self._vllm.SamplingParams(
            temperature=float(is_sampled), ignore_eos=True, max_tokens=num_tokens, detokenize=False, seed=None
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started_s = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        duration_s = time.perf_counter() - started_s
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {num_tokens}:
            raise RuntimeError(f"{counts} tokens instead of {num_tokens}")
        return duration_s


def all_texts(options: argparse.Namespace, generate: Generate) -> dict[str, Any]:
    """ms a token by text and batch: what comes again, the same at temperature 1, and nothing to be found."""
    batches = (1, 4) if options.small else (1, 16, 64, 256)
    return _texts(options, generate, ("repeat", "sampled", "new"), batches)


def _texts(
    options: argparse.Namespace, generate: Generate, texts: Sequence[str], batches: Sequence[int]
) -> dict[str, Any]:
    vocab_size = _vocab_size(options)
    num_in, num_out, repeats = (60, 20, 1) if options.small else (256, 384, _REPEATS)
    found: dict[str, Any] = {}
    generate(_prompts("repeat", 2, num_in, vocab_size), 40, False)  # whatever is made when it is first used
    for text in texts:
        for batch in batches:
            prompts = _prompts(text, batch, num_in, vocab_size)
            firsts_s, all_s = (
                min([generate(prompts, count, text == "sampled") for _ in range(repeats)]) for count in (1, num_out)
            )
            found[f"{text}_{batch}_ms"] = round(1e3 * (all_s - firsts_s) / (num_out - 1), 3)
    return found


def _prompts(text: str, count: int, length: int, vocab_size: int) -> Prompts:
    """Of each another circle; or of nothing that comes twice."""
    first = start_of_new(vocab_size)
    if text == "new":
        tokens = iter(walk(vocab_size, first, count * length))
        return [[next(tokens) for _ in range(length)][::-1] for _ in range(count)]
    return [walk(vocab_size, 50 * (index + 1) % first, length) for index in range(count)]


def _engine(options: argparse.Namespace, drafts: Drafts | None) -> BareEngine:
    from benchmarks.gpu.bare_engine import BareEngine, EngineSize

    size = EngineSize(
        4 if options.small else 256, 256 if options.small else _MAX_MODEL_LEN, 2304,
        8192 if options.small else 256 * _MAX_MODEL_LEN, device=options.device,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        engine = BareEngine(str(folder), options.dtype, "dummy", size, 1, drafts=drafts)
    make_walk(engine.model, _vocab_size(options))
    return engine


def _measured(
    options: argparse.Namespace, engine: BareEngine, measure: Callable[[argparse.Namespace, Generate], dict[str, Any]]
) -> dict[str, Any]:
    near, far = (followers(_vocab_size(options), ahead).tolist() for ahead in (1, AHEAD))
    counts = count_drafts(engine)

    def generate(prompts: Prompts, num_tokens: int, is_sampled: bool) -> float:
        sampling = SamplingParams(temperature=float(is_sampled), seed=7)
        started_s = time.perf_counter()
        streams = engine.run(prompts, [num_tokens] * len(prompts), sampling)
        duration_s = time.perf_counter() - started_s
        text = [prompts[0][-1], *streams[0].tokens]
        steps = sum(new not in (near[last], far[last]) for last, new in pairwise(text))
        if steps > 0.02 * num_tokens:
            raise RuntimeError(f"no walk: {text[:20]}")
        return duration_s

    with engine:
        found = measure(options, generate)
    return {"start_s": round(engine.start_s, 1), **found, **counts}


def count_drafts(engine: BareEngine) -> dict[str, int]:
    """What goes on counting from now on: rows that were planned with drafts, drafts that there were, and those that
    held. Mutates the engine's planner."""
    accepted = {"drafted": 0, "held": 0, "rows": 0}
    planner = engine.scheduler.drafts
    if planner is None:
        return accepted
    settled = planner.settled

    def counting(request: Any, one: Any) -> None:
        accepted["rows"] += 1
        accepted["drafted"] += one.num_drafted
        accepted["held"] += one.num_accepted - 1
        settled(request, one)

    planner.settled = counting  # type: ignore[method-assign]
    return accepted


def ngram_drafts(constant: int | None) -> Drafts:
    """By n-grams of 2 to 4 tokens. constant: in every row so many; None: as many as pay."""

    from benchmarks.gpu.bare_drafts import Drafts
    from replicas.speculation.ngram_drafter import NgramDrafter

    def on_card(_: Any) -> Any:
        from replicas.cuda.card_drafts import CardDrafting
        from replicas.cuda.card_ngram_drafter import CardNgramDrafter

        return CardDrafting(lambda slots: CardNgramDrafter(slots, MAX_DRAFTS, 2, 4), MAX_DRAFTS, is_told=False)

    return Drafts(MAX_DRAFTS, lambda history: NgramDrafter(history, 2, 4), on_card, constant)


def _oracle(options: argparse.Namespace, is_fp8: bool) -> Any:
    from benchmarks.gpu.head_products import HeadProducts
    from benchmarks.gpu.oracle_drafter import OracleDrafter
    from replicas.cuda.card_drafts import CardDrafting

    config = json.loads(options.shape.read_text())
    behind = followers(_vocab_size(options), 1)

    def make_drafter(slots: Any) -> Any:
        products = HeadProducts(config, _DRAFT_VOCABULARY, slots.state.device, is_fp8=is_fp8)
        return OracleDrafter(slots, behind, _HOLDING, products)

    return CardDrafting(make_drafter, MAX_DRAFTS)


def _vocab_size(options: argparse.Namespace) -> int:
    size: int = json.loads(options.shape.read_text())["vocab_size"]
    return size


PIECES: dict[str, Piece] = {
    "speculative-plain": plain,
    "speculative": ngram,
    "speculative-oracle": oracle,
    "speculative-oracle-fp8": partial(oracle, is_fp8=True),
    "speculative-eagle3": eagle3,
    "vllm-plain": partial(vllm, None),
    "vllm-ngram": partial(vllm, _VLLM_NGRAMS),
}


if __name__ == "__main__":
    run_named(PIECES, __doc__)
