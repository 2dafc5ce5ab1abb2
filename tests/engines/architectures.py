"""Which architectures are served and which are refused, each as a tiny random model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_FULL = ["full_attention"] * 3
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True, slots=True)
class Case:
    """refusal: what the message must name; empty for a model that is served. max_model_len: at which."""

    name: str
    config_class: str
    changes: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    max_model_len: int = 256


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_LONGROPE = _rope("longrope", short_factor=[1.0, 1.2, 1.4, 1.6], long_factor=[2.0, 4.0, 6.0, 8.0],
                  original_max_position_embeddings=128)  # fmt: skip
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_LLAMA4_SCALE = _rope("yarn", factor=4.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.3, mscale=1.0,
                      mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)  # fmt: skip

SERVED = [
    Case("llama", "LlamaConfig"),
    Case("llama-multi-head", "LlamaConfig", {"num_key_value_heads": 4}),
    Case("llama-multi-query", "LlamaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    Case("llama-biases", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("llama-linear", "LlamaConfig", _rope("linear", factor=4.0)),
    Case("llama-yarn", "LlamaConfig", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Case("llama-llama3", "LlamaConfig", _LLAMA3),
    Case("llama-dynamic", "LlamaConfig", _rope("dynamic", factor=4.0)),
    Case("llama-longrope", "LlamaConfig", _LONGROPE, max_model_len=128),
    Case("mistral", "MistralConfig", {"sliding_window": None}),
    Case("ministral", "MinistralConfig", {"sliding_window": 64, "layer_types": _FULL, "head_dim": 8}),
    Case("ministral3", "Ministral3Config", _LLAMA4_SCALE),
    Case("mixtral", "MixtralConfig", {"num_local_experts": 4}),
    Case("qwen2", "Qwen2Config"),
    Case("qwen2-unused-window", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 64}),
    Case("qwen3", "Qwen3Config", {"head_dim": 16}),
    Case("qwen2-moe", "Qwen2MoeConfig", {"num_experts": 4, "shared_expert_intermediate_size": 24, **_EXPERTS}),
    Case("qwen3-moe", "Qwen3MoeConfig", {"num_experts": 4, **_EXPERTS}),
    Case("phi", "PhiConfig", {"partial_rotary_factor": 0.5}),
    Case("phi3", "Phi3Config"),
    Case("phi3-longrope", "Phi3Config", {**_LONGROPE, "original_max_position_embeddings": 128}, max_model_len=128),
    Case("phimoe", "PhimoeConfig", {"num_local_experts": 4}),
    Case("gemma", "GemmaConfig", {"head_dim": 16}),
    Case("granite", "GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    Case("granitemoe", "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("granitemoeshared", "GraniteMoeSharedConfig", {"num_local_experts": 4, "shared_intermediate_size": 24}),
    Case("olmo", "OlmoConfig", {"clip_qkv": 0.5}),
    Case("olmo2", "Olmo2Config"),
    Case("olmoe", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    Case("flex-olmo", "FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    Case("cohere", "CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    Case("starcoder2", "Starcoder2Config", {"sliding_window": None}),
    Case("gpt2", "GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
    Case("gpt-neox", "GPTNeoXConfig", {"rotary_pct": 0.5}),
    Case("gpt-bigcode", "GPTBigCodeConfig", {"multi_query": True}),
    Case("gpt-bigcode-multi-head", "GPTBigCodeConfig", {"multi_query": False}),
    Case("gptj", "GPTJConfig", {"rotary_dim": 4}),
    Case("codegen", "CodeGenConfig", {"rotary_dim": 4}),
    Case("opt", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Case("persimmon", "PersimmonConfig"),
    Case("jetmoe", "JetMoeConfig", {"num_local_experts": 4, "kv_channels": 8}),
    Case("glm", "GlmConfig", {"head_dim": 8}),
    Case("glm4", "Glm4Config", {"head_dim": 8}),
    Case("glm4-moe", "Glm4MoeConfig", {"head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, **_EXPERTS}),
    Case("helium", "HeliumConfig", {"head_dim": 8}),
    Case("smollm3", "SmolLM3Config", {"no_rope_layer_interval": 2}),
    Case("exaone4", "Exaone4Config", {"sliding_window": None, "layer_types": _FULL}),
    Case("ernie4-5", "Ernie4_5Config", {"head_dim": 8}),
    Case("ernie4-5-moe", "Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    Case("hunyuan-dense", "HunYuanDenseV1Config", {"head_dim": 8}),
    Case("hunyuan-moe", "HunYuanMoEV1Config", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    Case("minimax-m2", "MiniMaxM2Config", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("apertus", "ApertusConfig"),
    Case("arcee", "ArceeConfig"),
    Case(
        "dots1",
        "Dots1Config",
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": None, **_EXPERTS},
    ),
    Case("seed-oss", "SeedOssConfig", {"head_dim": 8}),
    Case("bitnet", "BitNetConfig"),
    Case("nanochat", "NanoChatConfig"),
    Case("ctrl", "CTRLConfig", {"dff": 48}),
    Case("exaone", "ExaoneConfig"),
    Case("aria-text", "AriaTextConfig", {"moe_num_experts": 4, "moe_topk": 2}),
    Case("hy-v3", "HYV3Config", {"head_dim": 8, "num_experts": 4, **_EXPERTS}),
    Case("hyperclovax", "HyperCLOVAXConfig", {"head_dim": 8}),
    Case("internlm3", "InternLM3Config", {"head_dim": 8}),
    Case("iquestcoder", "IQuestCoderConfig", {"head_dim": 8}),
    Case("jais2", "Jais2Config", {"head_dim": 8}),
    Case("sarvam-moe", "SarvamMoEConfig", {"head_dim": 8, "num_experts": 4, **_EXPERTS}),
    Case("solar-open", "SolarOpenConfig", {"head_dim": 8, "n_routed_experts": 4, **_EXPERTS}),
    Case("lfm2", "Lfm2Config", {"layer_types": _FULL}),
    Case("bert-decoder", "BertConfig", {"is_decoder": True}),
    Case(
        "dbrx",
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
]

REFUSED = [
    Case("longrope", "LlamaConfig", _LONGROPE, "longrope.*max_model_len to 128"),
    Case("phi3-longrope", "Phi3Config", {**_LONGROPE, "original_max_position_embeddings": 128}, "longrope.*128"),
    Case("dynamic", "LlamaConfig", _rope("dynamic", factor=4.0), "dynamic.*max_model_len to 256", 512),
    Case("mistral-window", "MistralConfig", {"sliding_window": 64}, "sliding-window"),
    Case(
        "qwen2-window",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "hybrid layers",
    ),
    Case("ministral-window", "MinistralConfig", {"head_dim": 8}, "sliding"),
    Case("gemma2", "Gemma2Config", {"head_dim": 8}, "hybrid layers"),
    Case("gemma3", "Gemma3TextConfig", {"head_dim": 8}, "hybrid layers"),
    Case("olmo3", "Olmo3Config", {}, "hybrid layers"),
    Case("cohere2", "Cohere2Config", {}, "hybrid layers"),
    Case("exaone4-window", "Exaone4Config", {}, "hybrid layers"),
    Case("deepseek-v2", "DeepseekV2Config", {"n_routed_experts": 4}, "latent"),
    Case("minicpm3", "MiniCPM3Config", {}, "latent"),
    Case("gpt-oss", "GptOssConfig", {"num_local_experts": 4, "head_dim": 8}, "hybrid layers"),
    Case("qwen3-next", "Qwen3NextConfig", {"num_experts": 4, **_EXPERTS}, "hybrid layers"),
    Case("minimax", "MiniMaxConfig", {"num_local_experts": 4, "head_dim": 8}, "hybrid layers"),
    Case("mamba", "MambaConfig", {}, "hybrid layers"),
    Case("jamba", "JambaConfig", {"num_experts": 4, "use_mamba_kernels": False}, "hybrid layers"),
    Case("recurrent-gemma", "RecurrentGemmaConfig", {}, "hybrid layers"),
    Case("bloom", "BloomConfig", {}, "ALiBi"),
    Case("mpt", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 3}, "ALiBi"),
    Case("falcon-alibi", "FalconConfig", {"alibi": True}, "ALiBi"),
    Case("bart", "BartConfig", {"d_model": 32}, "encoder-decoder|attention be replaced"),
    Case("falcon", "FalconConfig", {}, "FalconForCausalLM.*attention be replaced"),
    Case(
        "falcon-new",
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "FalconForCausalLM.*attention be replaced",
    ),
    Case("gpt-neo", "GPTNeoConfig", {"attention_types": [[["global"], 3]]}, "attention be replaced"),
    Case("stablelm", "StableLmConfig", {}, "attention be replaced"),
    Case("xglm", "XGLMConfig", {"ffn_dim": 48}, "attention be replaced"),
    Case("biogpt", "BioGptConfig", {}, "attention be replaced"),
    Case("openai-gpt", "OpenAIGPTConfig", {}, "attention be replaced"),
    Case("rwkv", "RwkvConfig", {}, "attention be replaced"),
    Case("gpt-neox-japanese", "GPTNeoXJapaneseConfig", {}, "attention be replaced"),
    Case("nemotron", "NemotronConfig", {}, "NemotronForCausalLM.*arguments are not passed on"),
    Case("diffllama", "DiffLlamaConfig", {}, "DiffLlamaForCausalLM.*called 6 times"),
    Case("hrm-text", "HrmTextConfig", {"head_dim": 8}, "HrmTextForCausalLM.*called 24 times"),
    Case("doge", "DogeConfig", {}, "DogeForCausalLM.*mask of its own"),
    Case("bert", "BertConfig", {}, "BertLMHeadModel.*later tokens"),
    Case("roberta", "RobertaConfig", {}, "RobertaForCausalLM.*later tokens"),
    # Counts positions in its own way: from behind the padding's id.
    Case("roberta-decoder", "RobertaConfig", {"is_decoder": True}, "RobertaForCausalLM.*differ from transformers' own"),
]
