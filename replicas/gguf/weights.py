"""Writes the transformers folder of a GGUF file: config, tokenizer, weights in float32."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replicas.gguf.config import model_config
from replicas.gguf.file import GgufFile, read_gguf
from replicas.gguf.tensors import check_tensors
from replicas.gguf.tokenizer import write_tokenizer
from replicas.model_support import UnsupportedModel, refuse_unsupported

logger = logging.getLogger(__name__)


def write_model(gguf: Path, folder: Path) -> None:
    """Blocks for half a minute and more. Raises OSError, and UnsupportedModel, naming what is in the file that can't be
    served: if it can, before it reads weights.
    """
    file = read_gguf(gguf)
    config = model_config(file)
    refuse_unsupported(config)
    check_tensors(file, config)
    with _named(file, "tokenizer"):
        write_tokenizer(file, folder)
    _write_weights(file, config, folder)


def _write_weights(file: GgufFile, config: Any, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    logger.info(
        "reading weights", extra={"event": "gguf_reading", "file": str(file.path), "num_tensors": len(file.shapes)}
    )
    with _named(file, "weights"):
        quantised, report = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent),
            gguf_file=file.path.name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
        )
    for kind, keys in report.items():
        if keys:  # transformers has drawn random numbers for what is missing
            raise UnsupportedModel(f"{file.path}: {kind.replace('_', ' ')}: {', '.join(sorted(map(str, keys))[:4])}")
    # Weights are float32 tensors by now, but transformers refuses to save what was read from a GGUF: a
    # plain model of the same shape takes them over (on "meta": without a second copy).
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    logger.info("writing weights", extra={"event": "gguf_writing", "folder": str(folder)})
    plain.save_pretrained(folder)


@contextmanager
def _named(file: GgufFile, part: str) -> Iterator[None]:
    """Names the file in what transformers says of it."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{file.path}: transformers can't read its {part}: {type(error).__name__}: {error}"
        ) from error
