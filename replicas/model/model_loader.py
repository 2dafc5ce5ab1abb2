"""Loads a transformers causal language model with our attention, and says what it is.

A GGUF is first made a transformers folder, once (`replicas.gguf.conversion`). Nothing of the model's own code
runs unless the config trusts it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from replicas.gguf.conversion import resolve_source
from replicas.hub_model import refuse_unavailable
from replicas.kv.kv_pool import KvLayout
from replicas.layers.attention_seam import use_attention
from replicas.layers.replaced_layers import before_serving, replace_layers
from replicas.model.attention import ATTENTION_NAME, paged_attention
from replicas.model.checkpoint import FilesAsRead, random_model, read_checkpoint
from replicas.model.identity_digests import config_digest, config_text, tokenizer_digest
from replicas.model.reference_logits import CheckedPrompt
from replicas.model.remote_code import remote_code
from replicas.model.untouched_model import examine
from replicas.model.weights_digest import digest_weights
from replicas.model_identity import ModelIdentity
from replicas.model_support import model_name, naming_failures, refuse_unsupported
from replicas.position_reach import refuse_step_dependent
from replicas.settings import ModelSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model is in eval mode on its device. identity: of what was loaded, without a layout.

    reference: what transformers alone computed with it, before it was changed to be served.
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

    def kv_layout(self, block_size: int) -> KvLayout:
        """Of a pool for this model alone, in its own type."""
        return KvLayout(self.num_layers, block_size, self.num_kv_heads, self.head_dim, self.dtype)


def load_model(settings: ModelSettings, device: torch.device) -> LoadedModel:
    """Load weights onto the device. Blocks for seconds to minutes; logs progress.

    Raises UnsupportedModel for an architecture that our attention does not compute, or that fails in any way while it
    is built or looked at; CheckpointMismatch, one of these, for files that are not what their config says or change
    meanwhile; OSError when they are not there; HubRefusal for a Hub id that can't be had.
    """
    transformers_logging.disable_progress_bar()  # ours are log lines; a bar a replica garbles the terminal
    refuse_unavailable(settings.source)
    folder = resolve_source(settings.source, settings.cache_dir)
    files = FilesAsRead.now(folder)
    with naming_failures(settings.source, "reading its configuration"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    refuse_unsupported(config)
    refuse_step_dependent(config, settings.max_model_len)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    logger.info("the model's files", extra={"event": "weights_loading", "source": settings.source})
    config_said = config_text(config)  # before anything is set in it
    with naming_failures(model_name(config), "loading it"):
        if settings.load_format == "dummy":
            model = random_model(config, dtype, device, settings.trust_remote_code)
        else:
            model = read_checkpoint(folder, config, dtype, device, settings.trust_remote_code)
        of_config = config_digest(config_said, remote_code(model))
        identity = ModelIdentity(digest_weights(model), of_config, tokenizer_digest(folder), settings.dtype)
        files.refuse_change()
        model = model.to(device).eval().requires_grad_(False)
    with naming_failures(model_name(config), "a first forward pass"):
        examined = examine(model, settings.max_model_len)
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
        )
