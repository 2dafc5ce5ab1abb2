"""Loads a transformers causal language model with our attention, and says what it is.

A GGUF is first made a transformers folder, once (`replicas.model.gguf_conversion`). Nothing of the model's own code
runs unless the config trusts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from replicas.kv.kv_pool import KvLayout
from replicas.model.attention import ATTENTION_NAME, register_attention
from replicas.model.fused_projections import fuse_projections
from replicas.model.gguf_conversion import resolve_source
from replicas.model.model_support import model_name, naming_failures, refuse_unsupported
from replicas.model.output_head import lay_out_head
from replicas.model.reference_logits import CheckedPrompt
from replicas.model.rotary_positions import refuse_step_dependent
from replicas.model.untouched_model import examine
from replicas.settings import ModelSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model is in eval mode on its device. fingerprint names architecture, weights and dtype.

    reference: what transformers alone computed with it, before it was changed to be served.
    """

    model: nn.Module
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    fingerprint: str
    reference: tuple[CheckedPrompt, ...]

    def kv_layout(self, block_size: int) -> KvLayout:
        return KvLayout(self.num_layers, block_size, self.num_kv_heads, self.head_dim, self.dtype)


def load_model(settings: ModelSettings, device: torch.device) -> LoadedModel:
    """Load weights onto the device. Blocks for seconds to minutes; logs progress.

    Raises UnsupportedModel for an architecture that our attention does not compute, or that fails in any way while it
    is built or looked at; OSError when the files are not there.
    """
    register_attention()
    transformers_logging.disable_progress_bar()  # ours are log lines; a bar a replica garbles the terminal
    folder = resolve_source(settings.source, settings.cache_dir)
    with naming_failures(settings.source, "reading its configuration"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    refuse_unsupported(config)
    refuse_step_dependent(config, settings.max_model_len)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    logger.info("loading weights", extra={"event": "weights_loading", "source": settings.source})
    with naming_failures(model_name(config), "loading it"):
        model = _load_weights(settings, folder, config, dtype, device)
        model = model.to(device).eval().requires_grad_(False)
    with naming_failures(model_name(config), "a first forward pass"):
        examined = examine(model, settings.max_model_len)
    with naming_failures(model_name(config), "laying out its weights"):
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        fuse_projections(model)
        lay_out_head(model)
        return LoadedModel(
            model=model,
            num_layers=examined.attention.num_layers,
            num_kv_heads=examined.attention.num_kv_heads,
            head_dim=examined.attention.head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            dtype=dtype,
            fingerprint=_fingerprint(settings, folder, config),
            reference=examined.reference,
        )


def _load_weights(
    settings: ModelSettings, folder: str, config: Any, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """On the device from the start: nothing is made, or kept, in host memory for a GPU."""
    if settings.load_format == "dummy":
        torch.manual_seed(0)  # every replica must hold the same random weights
        with device:
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=settings.trust_remote_code
            )
        return model
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=settings.trust_remote_code,
        device_map=None if device.type == "cpu" else device,
    )
    return loaded


def _fingerprint(settings: ModelSettings, folder: str, config: Any) -> str:
    """Two replicas with equal fingerprints hold the same weights, as far as names and sizes of files tell."""
    described = {k: v for k, v in config.to_dict().items() if k != "_name_or_path" and not k.startswith("_attn")}
    parts: list[object] = [json.dumps(described, sort_keys=True, default=str), settings.dtype, settings.load_format]
    if Path(folder).is_dir():
        parts += [(p.name, p.stat().st_size) for p in sorted(Path(folder).glob("*.safetensors"))]
    else:
        parts.append(folder)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
