"""One engine's half of benchmarks.gpu.side_by_side, in a process of its own: load, measure, write JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.offline_workload import FEWEST_STEPS, OfflineEngine, OfflineRun, Prompts, measure, steady_window_ms
from benchmarks.gpu.random_bits import fill_few_bits

if TYPE_CHECKING:
    from benchmarks.gpu.bare_engine import FewBits

# Both engines: prompts plus outputs, and most tokens of a step (vLLM's own default for offline use on an H100).
MAX_MODEL_LEN, STEP_TOKENS = 16_384, 16_384


class VllmEngine:
    """vLLM's offline class with its defaults, but no prefix cache. Its engine is a process below this one."""

    def __init__(self, folder: str, choices: Mapping[str, Any] | None = None) -> None:
        """choices: what else its class is to be told."""
        self._vllm: Any = import_module("vllm")  # it is in no environment of ours
        self._llm: Any = self._vllm.LLM(
            model=folder,
            **{
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": STEP_TOKENS,
                "enable_prefix_caching": False,
                **(choices or {}),
            },
        )
        self._step = self._llm.llm_engine.step
        self._llm.llm_engine.step = self._timed_step
        self._times_s: list[float] = []
        self._first_end: int | None = None

    def generate(self, prompts: Prompts, max_tokens: list[int]) -> OfflineRun:
        self._times_s, self._first_end = [], None
        params = [
            self._vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in max_tokens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started_s = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        duration_s = time.perf_counter() - started_s
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if num_tokens != sum(max_tokens):
            raise RuntimeError(f"{num_tokens} tokens instead of {sum(max_tokens)}")
        return OfflineRun(duration_s, num_tokens, self._steady_ms(max_tokens))

    def fill_few_bits(self) -> int:
        """As `random_bits.fill_few_bits`, where its model is; $VLLM_ALLOW_INSECURE_SERIALIZATION is to be 1 from before
        its start. Blocks. Raises RuntimeError if there was nothing to fill."""
        num_bytes = sum(self._llm.apply_model(fill_few_bits))
        if not num_bytes:
            raise RuntimeError("vLLM's model has no weights of few bits")
        return num_bytes

    def close(self) -> None:
        """Its engine ends with this process."""

    def _timed_step(self) -> Any:
        outputs = self._step()
        self._times_s.append(time.perf_counter())
        if outputs and self._first_end is None:  # only what has ended is given back
            self._first_end = len(self._times_s) - 1
        return outputs

    def _steady_ms(self, max_tokens: list[int]) -> float | None:
        if len(set(max_tokens)) > 1 or self._first_end is None:
            return None
        return steady_window_ms(self._times_s, self._first_end, max_tokens[0])


class OurEngine:
    """The decode engine of this repository, which computes prompts too; without Ray, HTTP and token channel."""

    def __init__(
        self,
        folder: str,
        device: str,
        step_tokens: int,
        dtype: str,
        bits: FewBits | None = None,
        *,
        max_sequences: int = 256,
        max_model_len: int = MAX_MODEL_LEN,
        capacity_tokens: int | None = None,
    ) -> None:
        from benchmarks.gpu.bare_engine import BareEngine, EngineSize
        from replicas.structured_log import configure_logging

        configure_logging("INFO", "text")  # says what the start is made of
        capacity = capacity_tokens if device == "cuda" else 65_536
        size = EngineSize(max_sequences, max_model_len, step_tokens, capacity_tokens=capacity, device=device)
        self.bare = BareEngine(folder, dtype, "dummy", size, bits=bits)
        self.bare.engine.start()

    def close(self) -> None:
        self.bare.engine.stop()

    def generate(self, prompts: Prompts, max_tokens: list[int]) -> OfflineRun:
        from benchmarks.gpu.bare_engine import steady_step_ms
        from scheduler.sampling_params import SamplingParams

        started_s = time.perf_counter()
        streams = self.bare.run(prompts, max_tokens, SamplingParams(temperature=0.0))
        duration_s = time.perf_counter() - started_s
        num_tokens = sum(len(stream.tokens) for stream in streams)
        if num_tokens != sum(max_tokens):
            raise RuntimeError(f"{num_tokens} tokens instead of {sum(max_tokens)}")
        is_steady = len(set(max_tokens)) == 1 and max_tokens[0] > 2 * FEWEST_STEPS
        return OfflineRun(duration_s, num_tokens, steady_step_ms(streams) if is_steady else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["vllm", "ours"])
    parser.add_argument("folder")
    parser.add_argument("--started-at", type=float, required=True, help="time.time() of the process's start")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    engine: OfflineEngine
    if options.engine == "vllm":
        engine = VllmEngine(options.folder)
    else:
        engine = OurEngine(options.folder, options.device, options.step_tokens, options.dtype)
    start_s = time.time() - options.started_at
    print(f"ready after {start_s:.1f} s", flush=True)
    try:
        figures = {"start to ready, s": start_s, **measure(engine)}
    finally:
        engine.close()
    names = ["torch", "transformers", "triton"] + (["vllm"] if options.engine == "vllm" else [])
    versions = {name: version(name) for name in names if options.device == "cuda"}
    options.out.write_text(json.dumps({"figures": figures, "versions": versions}, indent=1))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
