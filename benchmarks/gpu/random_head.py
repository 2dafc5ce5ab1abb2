"""An EAGLE-3 head of random weights for a model of some shape: what one costs, whatever its drafts are worth."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.model.model_loader import LoadedModel
from replicas.speculation.eagle3_files import Eagle3Config
from replicas.speculation.eagle3_head import Eagle3Head


def random_head(served: LoadedModel, draft_vocab_size: int) -> Eagle3Head:
    """As EAGLE's own for such a model: a layer of its shape, that looks into three of its layers; on its device. It
    drafts the first tokens of the model's vocabulary."""
    model: Any = served.model
    config, count = model.config.get_text_config(), served.num_layers
    device = model.get_input_embeddings().weight.device
    layer = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=served.num_kv_heads,
        head_dim=served.head_dim, num_hidden_layers=1, max_position_embeddings=config.max_position_embeddings,
    )  # fmt: skip
    layer_ids = tuple(sorted((min(2, count), count // 2, max(count - 3, 0))))
    settings = Eagle3Config(layer, draft_vocab_size, config.hidden_size, layer_ids)
    with torch.device("meta"):
        head = Eagle3Head(settings, count, torch.arange(draft_vocab_size))
    head.embed_tokens = model.get_input_embeddings()
    generator = torch.Generator(device).manual_seed(5)
    own = {name: tensor for name, tensor in head.state_dict().items() if not name.startswith("embed_tokens.")}
    for name, tensor in own.items():
        numbers = torch.randn(tensor.shape, dtype=torch.float32, device=device, generator=generator)
        if tensor.ndim == 1:
            numbers = torch.ones_like(numbers)
        else:
            numbers /= tensor.shape[1] ** 0.5
        own[name] = numbers.to(served.dtype)
    head.load_state_dict(own, strict=False, assign=True)
    head.target_ids = torch.arange(draft_vocab_size, device=device)
    head.rotary_emb = LlamaRotaryEmbedding(layer).to(device)
    return head.eval().requires_grad_(False)
