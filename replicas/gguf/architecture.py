"""The architectures that are served out of a GGUF file, and where transformers keeps what their settings say.

Which settings llama.cpp writes for each: its convert_hf_to_gguf.py and llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """model_type: transformers' name. attributes: of its config by setting; the file must have each of them.
    constants: what the architecture implies in llama.cpp and the config class has another default for.
    traits: attributes that are true in a file with that tensor.
    has_rope: positions are rotations. partial_rope: perhaps of a part of each head. rope_tensors: which the file may
    have, with a factor for each frequency. transposed: endings of tensors that transformers keeps columns first.
    is_expert_normed: whether llama.cpp makes the weights of the chosen experts sum to one.
    """

    model_type: str
    attributes: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, str] = field(default_factory=dict)
    has_rope: bool = True
    partial_rope: bool = False
    rope_tensors: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    is_expert_normed: bool = False


_SHAPE = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    # Mistral's too: without a sliding window they are the same arithmetic.
    "llama": GgufArchitecture(
        "llama",
        _SHAPE | _RMS_NORM,
        traits={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        rope_tensors=(ROPE_FACTORS, *LONG_ROPE_FACTORS),
    ),
    "qwen2": GgufArchitecture("qwen2", _SHAPE | _RMS_NORM),
    "qwen3": GgufArchitecture("qwen3", _SHAPE | _RMS_NORM),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        _SHAPE | _RMS_NORM | _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants={"norm_topk_prob": False},
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        _SHAPE | _RMS_NORM | _EXPERTS,
        constants={"norm_topk_prob": True},
        is_expert_normed=True,
    ),
    "phi3": GgufArchitecture("phi3", _SHAPE | _RMS_NORM, partial_rope=True, rope_tensors=LONG_ROPE_FACTORS),
    "starcoder2": GgufArchitecture("starcoder2", _SHAPE | {"attention.layer_norm_epsilon": "norm_epsilon"}),
    "gpt2": GgufArchitecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        has_rope=False,
        transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
    ),
}
