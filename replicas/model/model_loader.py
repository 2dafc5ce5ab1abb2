"""Loads a transformers causal language model with our attention, and says what it is.

A GGUF is first made a transformers folder, once (`replicas.model.gguf_conversion`). Nothing of the model's own code
runs unless the config trusts it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from replicas.kv.kv_pool import KvLayout
from replicas.model.attention import register_attention
from replicas.model.checkpoint import FilesAsRead, random_model, read_checkpoint
from replicas.model.fused_projections import fuse_projections
from replicas.model.gguf_conversion import resolve_source
from replicas.model.model_support import UnsupportedModel, refuse_unsupported
from replicas.model.output_head import lay_out_head
from replicas.model.weights_digest import digest_weights
from replicas.model_identity import ModelIdentity, config_digest, tokenizer_digest
from replicas.settings import ModelSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model is in eval mode on its device. identity: of what was loaded, without a layout."""

    model: nn.Module
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    identity: ModelIdentity

    def kv_layout(self, block_size: int) -> KvLayout:
        return KvLayout(self.num_layers, block_size, self.num_kv_heads, self.head_dim, self.dtype)


def load_model(settings: ModelSettings, device: torch.device) -> LoadedModel:
    """Load weights onto the device. Blocks for seconds to minutes; logs progress.

    Raises UnsupportedModel for an architecture that our attention does not compute, CheckpointMismatch for files that
    are not what their config says or change meanwhile, OSError when they are not there.
    """
    register_attention()
    transformers_logging.disable_progress_bar()  # ours are log lines; a bar a replica garbles the terminal
    folder = resolve_source(settings.source, settings.cache_dir)
    files = FilesAsRead.now(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    refuse_unsupported(config)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    logger.info("loading weights", extra={"event": "weights_loading", "source": settings.source})
    identity_of_config = config_digest(config)  # before anything is set in it
    if settings.load_format == "dummy":
        model = random_model(config, dtype, device, settings.trust_remote_code)
    else:
        model = read_checkpoint(folder, config, dtype, device, settings.trust_remote_code)
    identity = ModelIdentity(digest_weights(model), identity_of_config, tokenizer_digest(folder), settings.dtype)
    files.refuse_change()
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")
    model = model.to(device).eval().requires_grad_(False)
    fuse_projections(model)
    lay_out_head(model)
    num_heads = config.num_attention_heads
    return LoadedModel(
        model=model,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=dtype,
        identity=identity,
    )
