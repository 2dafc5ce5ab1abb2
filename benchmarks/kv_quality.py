"""What KV in 8 bits costs in quality: perplexity over a fixed text, and a sentence found again in a long one.

    python -m benchmarks.kv_quality                     # perplexity, a few minutes on one core
    python -m benchmarks.kv_quality --needle 1024 8192  # in prompts of so many tokens

The text is Python's own language reference, which every Python has (`pydoc_data.topics`). The model is the bundled one,
in float32, one layer after the other by the runner that serves.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from cluster.config.model import find_bundled_gguf
from replicas.gguf.conversion import resolve_source
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.settings import ModelSettings
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import TokenLogprobs

KV_DTYPES = ("auto", "fp8")
_BLOCK_SIZE = 16
_CHUNK = 512
_NEEDLE = "The secret number of the city of Lisbon is 48213."
_QUESTION = "What is the secret number of the city of Lisbon?"
_ANSWER = "The secret number of the city of Lisbon is"
_FOUND = " 48213"
_DEPTHS = (0.1, 0.5, 0.9)


def fixed_text() -> str:
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    return "\n".join(topics[name] for name in sorted(topics))


def load_bundled(max_model_len: int) -> tuple[LoadedModel, Any]:
    """And its tokenizer. Blocks for seconds."""
    gguf = find_bundled_gguf()
    assert gguf is not None, "make setup installs it"
    cache_dir = str(Path("~/.cache/splitserve").expanduser())
    loaded = load_model(
        ModelSettings(str(gguf), cache_dir, "float32", max_model_len, "auto", False), torch.device("cpu")
    )
    return loaded, AutoTokenizer.from_pretrained(resolve_source(str(gguf), cache_dir))


def scores(
    loaded: LoadedModel, kv_dtype: str, token_ids: Sequence[int], num_scored: int | None = None, chunk: int = _CHUNK
) -> list[TokenLogprobs]:
    """Of the last tokens of a prompt, all but the first without num_scored, each behind those in front of it."""
    first = len(token_ids) - (len(token_ids) - 1 if num_scored is None else num_scored)
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    pool = KvPool(loaded.kv_layout(_BLOCK_SIZE, kv_dtype), num_blocks, torch.device("cpu"))
    runner = ModelRunner(loaded, pool, 1, num_blocks * _BLOCK_SIZE)
    init = SlotInit(0, 0, SamplingParams(0.0, num_prompt_logprobs=1), None)
    runner.launch(StepPlan(0, (init,), (TableWrite(0, 0, tuple(range(num_blocks))),), (), ())).result()
    found: list[TokenLogprobs] = []
    ends = sorted(
        {0, *range(chunk, first - 1, chunk), first - 1, *range(first - 1, len(token_ids), chunk), len(token_ids)}
    )
    for start, end in pairwise(ends):
        scored = tuple(token_ids[start + 1 : end + 1]) if start >= first - 1 else None
        targets = (SampleTarget(0, 0),) if end == len(token_ids) else ()
        part = Slice.of_prompt("text", 0, start, tuple(token_ids[start:end]), targets, scored)
        output = runner.launch(StepPlan(1, (), (), (), (part,))).result()
        found += [position for prompt in output.prompts for position in prompt.positions if position is not None]
    return found


def perplexities(
    loaded: LoadedModel, token_ids: Sequence[int], window: int, kv_dtypes: Sequence[str] = KV_DTYPES
) -> dict[str, float]:
    """By type of KV, over windows of the text that know nothing of each other."""
    sums, num_scored = dict.fromkeys(kv_dtypes, 0.0), 0
    for start in range(0, len(token_ids) - window + 1, window):
        for kv_dtype in kv_dtypes:
            logprobs = [score.logprob for score in scores(loaded, kv_dtype, token_ids[start : start + window])]
            sums[kv_dtype] -= sum(logprobs)
        num_scored += window - 1
    return {kv_dtype: math.exp(total / num_scored) for kv_dtype, total in sums.items()}


def needle_prompt(tokenizer: Any, num_tokens: int, depth: float) -> tuple[list[int], int]:
    """A chat of about so many tokens whose answer is in a sentence at that depth; the answer's last tokens count."""
    filler = tokenizer(fixed_text()).input_ids[: num_tokens - 120]
    cut = int(len(filler) * depth)
    text = f"{tokenizer.decode(filler[:cut])}\n{_NEEDLE}\n{tokenizer.decode(filler[cut:])}\n\n{_QUESTION}"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    found = tokenizer(_FOUND).input_ids
    return tokenizer(chat + _ANSWER).input_ids + found, len(found)


def needles(loaded: LoadedModel, tokenizer: Any, lengths: Sequence[int]) -> Iterator[str]:
    """A line for each prompt: by type of KV, whether each token of the number is the likeliest, and how likely all."""
    for length in lengths:
        for depth in _DEPTHS:
            token_ids, num_found = needle_prompt(tokenizer, length, depth)
            parts = []
            for kv_dtype in KV_DTYPES:
                found = scores(loaded, kv_dtype, token_ids, num_found)
                is_found = all(score.top[0][1] <= score.logprob for score in found)
                likely = math.exp(sum(score.logprob for score in found))
                parts.append(f"{kv_dtype} {'found' if is_found else 'lost'} ({likely:.3f})")
            yield f"{len(token_ids)} tokens, depth {depth:g}: {', '.join(parts)}"


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.kv_quality", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the text, for the perplexity; 0: none")
    parser.add_argument("--window", type=int, default=1_024, help="tokens that are computed together")
    parser.add_argument("--needle", type=int, nargs="*", default=[], metavar="TOKENS", help="lengths of prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded, tokenizer = load_bundled(max([options.window, *options.needle]))
    if options.tokens:
        token_ids = tokenizer(fixed_text()[: 10 * options.tokens]).input_ids[: options.tokens]
        digest = hashlib.blake2b(str(token_ids).encode(), digest_size=4).hexdigest()
        found = perplexities(loaded, token_ids, options.window)
        change = 100 * (found["fp8"] / found["auto"] - 1)
        print(f"perplexity over {len(token_ids)} tokens ({digest}) in windows of {options.window}: "
              f"{found['auto']:.4f}, KV in fp8 {found['fp8']:.4f} ({change:+.2f} %)", flush=True)  # fmt: skip
    for line in needles(loaded, tokenizer, options.needle):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
