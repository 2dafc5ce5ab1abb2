"""python -m benchmarks.gpu.quantised_pieces PIECE: weights and KV of few bits, in this engine or vLLM, a process each.

Both have the same prompts and lengths, timed the same way (`offline_workload`). A JSON line of all figures so far after
each of them: what is cut short leaves what it has. All other output goes to standard error. vLLM's pieces import
nothing of this engine: their process has vLLM's packages alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.offline_child import STEP_TOKENS, OurEngine, VllmEngine
from benchmarks.gpu.offline_workload import OfflineEngine, decode_steps, prefills, random_prompts
from benchmarks.gpu.piece_command import piece_options
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.teller import Figures, Teller, tell_on_card

_MAX_MODEL_LEN = 4096
# As RedHatAI's *-FP8-dynamic and Qwen's *-AWQ say it.
_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
# Of Llama-3.1-70B, beside what it has in common with 8B.
_LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_LARGE_STEP_TOKENS, _LARGE_CAPACITY_TOKENS = 2304, 40_000  # beside 75 GB of weights
# Sizes that are asked for: its other graphs take half a minute of a start.
_VLLM_GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}


@dataclass(frozen=True, slots=True)
class Piece:
    """quantise, kv_dtype: as in the config. said: of a config.json, where vLLM is what is measured."""

    quantise: str
    batches: tuple[int, ...]
    prefill: tuple[int, int] | None = None
    kv_dtype: str = "auto"
    said: dict[str, Any] | None = None
    is_large: bool = False


_PROMPTS = (16, 2048)
PIECES = {
    "steps-bf16": Piece("none", (1, 16, 64, 256), _PROMPTS),
    "steps-fp8": Piece("fp8", (1, 16, 64, 256), _PROMPTS),
    "steps-fp8-kv": Piece("fp8", (64, 256), _PROMPTS, kv_dtype="fp8"),
    "steps-int4": Piece("int4", (1, 16, 64), _PROMPTS),
    "steps-int8": Piece("int8", (1, 16, 64)),
    "steps-70b": Piece("fp8", (1, 16), is_large=True),
    "vllm-fp8": Piece("fp8", (1, 16, 64, 256), _PROMPTS, said=_FP8),
    "vllm-fp8-kv": Piece("fp8", (64, 256), kv_dtype="fp8", said=_FP8),
    "vllm-awq": Piece("int4", (1, 16, 64), _PROMPTS, said=_AWQ),
}

PRODUCTS, _TILES_S = "quant-kernels", 45.0


def shape_of(piece: Piece, shape: Path, folder: Path, *, is_small: bool) -> Path:
    """A config.json in the folder. shape: of Llama-3.1-8B. is_small: of something tiny, which stays so."""
    config = json.loads(shape.read_text())
    if piece.is_large and not is_small:
        config |= _LARGE
    if piece.said is not None:
        config["quantization_config"] = piece.said
    path = folder / "shape.json"
    path.write_text(json.dumps(config))
    return path


def measure(piece: Piece, engine: OfflineEngine, is_small: bool, tell: Callable[[Figures], None]) -> None:
    """tell: is given each figure."""
    batches = (1, 4) if is_small else piece.batches
    count = min(16, max(batches))
    engine.generate(random_prompts(random.Random(0), [300] * count), [16] * count)
    for batch in batches:
        (found,) = decode_steps(engine, (batch,)).values()
        tell({f"step_{batch}_ms": None if found is None else round(found, 3)})
    if piece.prefill is not None:
        count, length = (2, 200) if is_small else piece.prefill
        (rate,) = prefills(engine, ((count, length),)).values()
        tell({f"prefill_{count}x{length}_tok_s": round(rate)})


def run(piece: Piece, options: argparse.Namespace, tell: Callable[[Figures], None]) -> None:
    """Blocks for a minute or two. tell: is given figures as they come."""
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        shape = shape_of(piece, options.shape, Path(name), is_small=options.small)
        folder = make_shape_folder(shape, Path(name) / "model")
        engine: OfflineEngine
        if piece.said is not None:
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `fill_few_bits`
            engine = VllmEngine(str(folder), _vllm_choices(piece))
            tell({"start_s": round(time.perf_counter() - started_s, 1)})
            _fill(piece, engine, tell)
        else:
            engine, figures = _ours(piece, str(folder), options)
            tell({"start_s": round(time.perf_counter() - started_s, 1), **figures})
        try:
            measure(piece, engine, options.small, tell)
        finally:
            engine.close()


def _fill(piece: Piece, engine: VllmEngine, tell: Callable[[Figures], None]) -> None:
    """Random weights in place of what the loader left; told is what prompts gained by it."""
    if piece.prefill is not None:
        (rate,) = prefills(engine, (piece.prefill,)).values()
        tell({"prefill_as_loaded_tok_s": round(rate)})
    tell({"filled_gb": round(engine.fill_few_bits() / 1e9, 2)})


def _ours(piece: Piece, folder: str, options: argparse.Namespace) -> tuple[OurEngine, Figures]:
    from benchmarks.gpu.bare_engine import FewBits

    engine = OurEngine(
        folder,
        options.device,
        512 if options.small else _LARGE_STEP_TOKENS if piece.is_large else STEP_TOKENS,
        options.dtype,
        FewBits(piece.quantise, piece.kv_dtype),
        max_sequences=max(4, *piece.batches),
        max_model_len=_MAX_MODEL_LEN,
        capacity_tokens=_LARGE_CAPACITY_TOKENS if piece.is_large else None,
    )
    bare = engine.bare
    figures: Figures = {
        "load_s": round(bare.load_s, 1),
        "weights_gb": round(bare.memory.weights_bytes / 1e9, 2),
        "load_peak_gb": round(bare.memory.peak_bytes / 1e9, 2),
        "kv_pool_tokens": bare.runner.pool.num_blocks * bare.runner.pool.layout.block_size,
        "self_check_difference": round(bare.self_check_difference, 4),
    }
    return engine, figures | ({"failed_check": bare.failed_check} if bare.failed_check else {})


def _vllm_choices(piece: Piece) -> dict[str, Any]:
    choices: dict[str, Any] = {"max_model_len": _MAX_MODEL_LEN, "compilation_config": _VLLM_GRAPHS}
    if piece.kv_dtype == "fp8":
        choices["kv_cache_dtype"] = "fp8"
    return choices


def _measure_tiles(tell: Callable[[Figures], None]) -> None:
    from benchmarks.gpu.product_tiles import product_tiles

    product_tiles(tell, _TILES_S)


def main() -> None:
    options = piece_options([*PIECES, PRODUCTS], __doc__)
    if options.piece == PRODUCTS:
        tell_on_card(options.device, _measure_tiles)
    else:
        run(PIECES[options.piece], options, Teller())


if __name__ == "__main__":
    main()
