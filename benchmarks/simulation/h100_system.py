"""The system that is simulated: Llama-3.1-8B on H100s, without any of them."""

from __future__ import annotations

from pathlib import Path

from cluster.config.root import Config
from cluster.simulation.cost_model import CostModel, load_costs

STEP_TIMES = Path(__file__).parents[1] / "step_times" / "llama-3.1-8b-h100.json"
AZURE_CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE_CONVERSATION = AZURE_CONVERSATION.with_name("mooncake_conversation_trace.jsonl")
MAX_MODEL_LEN = 8192


def h100_costs() -> CostModel:
    return load_costs(STEP_TIMES)


def h100_config(decode_tokens: int = 400_000) -> Config:
    """One pair of replicas. decode_tokens: its KV cache (400,000: what an 80 GB card has left, performance.md)."""
    common = {"max_running_sequences": 256, "max_batch_tokens": 8192, "lag": 1}
    return Config.model_validate(
        {
            "model": {"source": "bundled", "max_model_len": MAX_MODEL_LEN},
            "pools": {
                "prefill": {"kv_capacity_tokens": 400_000, **common},
                "decode": {"kv_capacity_tokens": decode_tokens, **common},
            },
        }
    )
