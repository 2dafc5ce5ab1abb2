"""Loads a transformers causal language model with our attention, and says what it is.

A GGUF is first made a transformers folder, once (`replicas.gguf.conversion`). Nothing of the model's own code
runs unless the config trusts it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from replicas.gguf.conversion import resolve_source
from replicas.hub_model import refuse_missing_path, refuse_unavailable
from replicas.kv.kv_pool import KvLayout
from replicas.layers.attention_seam import use_attention
from replicas.layers.replaced_layers import before_serving, replace_layers
from replicas.model.attention import ATTENTION_NAME, paged_attention
from replicas.model.checkpoint import FilesAsRead, checkpoint_kv_scales, random_model, read_checkpoint
from replicas.model.identity_digests import config_digest, config_text, tokenizer_digest
from replicas.model.quantised_model import random_quantised, read_quantised, scheme_of
from replicas.model.reference_logits import CheckedPrompt
from replicas.model.remote_code import remote_code
from replicas.model.rounding_cache import KvRounding
from replicas.model.untouched_model import examine
from replicas.model.weights_digest import digest_weights
from replicas.model_identity import ModelIdentity
from replicas.model_support import model_name, naming_failures, refuse_unsupported
from replicas.position_reach import refuse_step_dependent
from replicas.quantisation.scheme import Scheme
from replicas.quantisation.scheme_reading import chosen_scheme
from replicas.settings import ModelSettings
from replicas.stored_numbers import FP8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model is in eval mode on its device. identity: of what was loaded, without a layout.

    reference: what transformers alone computed with it, before it was changed to be served. kv_scales: those that came
    with it, for KV in 8 bits (`KvLayout.scales`). scheme: of quantised weights.
    """

    model: nn.Module
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    identity: ModelIdentity
    reference: tuple[CheckedPrompt, ...]
    kv_scales: tuple[tuple[float, float], ...] = ()
    scheme: Scheme | None = None

    def kv_layout(self, block_size: int, kv_dtype: str = "auto") -> KvLayout:
        """Of a pool for this model alone: in its own type, or with kv_dtype "fp8" in 8 bits."""
        shape = (self.num_layers, block_size, self.num_kv_heads, self.head_dim)
        if kv_dtype == "fp8":
            return KvLayout(*shape, FP8, scales=self.kv_scales)
        return KvLayout(*shape, self.dtype)

    def identity_with(self, layout: KvLayout) -> ModelIdentity:
        """Of an engine with a pool of this layout. What is rounded otherwise than by the model gives other texts, so
        that the numbers in the pool are a part of the model's type too."""
        dtype = self.identity.dtype
        if layout.dtype is not self.dtype:
            dtype = f"{dtype}+kv:{layout.numbers}"
        return replace(self.identity, dtype=dtype, kv=layout.describe())


def load_model(settings: ModelSettings, device: torch.device, kv_dtype: str = "auto") -> LoadedModel:
    """Load weights onto the device. Blocks for seconds to minutes; logs progress. kv_dtype: of the pool that it will be
    served with, as in the config: the reference is computed with it.

    Raises UnsupportedModel for an architecture that our attention does not compute, or that fails in any way while it
    is built or looked at; CheckpointMismatch, one of these, for files that are not what their config says or change
    meanwhile; OSError when they are not there; HubRefusal for a Hub id that can't be had.
    """
    transformers_logging.disable_progress_bar()  # ours are log lines; a bar a replica garbles the terminal
    refuse_missing_path(settings.source)
    refuse_unavailable(settings.source)
    folder = resolve_source(settings.source, settings.cache_dir)
    files = FilesAsRead.now(folder)
    with naming_failures(settings.source, "reading its configuration"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    refuse_unsupported(config)
    refuse_step_dependent(config, settings.max_model_len)
    scheme = chosen_scheme(config, settings.quantise)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    logger.info("the model's files", extra={"event": "weights_loading", "source": settings.source})
    config_said = config_text(config)  # before anything is set in it
    with naming_failures(model_name(config), "loading it"):
        model = _load(folder, config, scheme, settings, device)
        scheme = scheme_of(model)
        kv_scales: tuple[tuple[float, float], ...] = ()
        if settings.load_format != "dummy":
            has_to = scheme is not None and scheme.has_kv_scales and kv_dtype == "fp8"  # else they do not count
            kv_scales = checkpoint_kv_scales(folder, config, are_all_there=has_to)
        of_config = config_digest(config_said, remote_code(model))
        identity = ModelIdentity(
            digest_weights(model),
            of_config,
            tokenizer_digest(folder),
            settings.dtype,
            scheme.describe() if scheme else "",
        )
        files.refuse_change()
        model = model.to(device).eval().requires_grad_(False)
    with naming_failures(model_name(config), "a first forward pass"):
        rounding = KvRounding(kv_scales) if kv_dtype == "fp8" else None
        examined = examine(model, settings.max_model_len, rounding)
        if rounding is not None:
            rounding.log_cut()
    with naming_failures(model_name(config), "laying out its weights"):
        use_attention(model, ATTENTION_NAME, paged_attention)
        replace_layers(model, before_serving(device))
        return LoadedModel(
            model=model,
            num_layers=examined.attention.num_layers,
            num_kv_heads=examined.attention.num_kv_heads,
            head_dim=examined.attention.head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            dtype=dtype,
            identity=identity,
            reference=examined.reference,
            kv_scales=kv_scales,
            scheme=scheme,
        )


def _load(folder: str, config: Any, scheme: Scheme | None, settings: ModelSettings, device: torch.device) -> nn.Module:
    dtype: torch.dtype = getattr(torch, settings.dtype)
    is_random = settings.load_format == "dummy"
    if scheme is not None:
        quantised = random_quantised if is_random else partial(read_quantised, folder)
        return quantised(config, scheme, dtype, device, settings.trust_remote_code)
    whole = random_model if is_random else partial(read_checkpoint, folder)
    return whole(config, dtype, device, settings.trust_remote_code)
