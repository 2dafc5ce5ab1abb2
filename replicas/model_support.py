"""Which architectures the paged attention serves. Anything else is refused by name at load.

Full causal attention with MHA, GQA or MQA and no term between scores and softmax. What we do not
compute would come out as fluent wrong text with status 200, so the default is to refuse. No torch: ingresses look here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class UnsupportedModel(Exception):
    """This model can't be served; the message names it and what it needs that is missing here."""


@contextmanager
def naming_failures(name: str, what: str) -> Iterator[None]:
    """Whatever goes wrong within raises UnsupportedModel that names the model, what was done to it, and the cause.

    These stay as they are: files that are not there (OSError), no memory left, and UnsupportedModel itself.
    """
    try:
        yield
    except (UnsupportedModel, OSError, MemoryError):
        raise
    except Exception as error:
        text = str(error).strip()
        if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text or "ALLOC_FAILED" in text:
            raise
        cause = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        raise UnsupportedModel(f"{name} can't be served: {what} failed with {cause}") from error


def model_name(config: Any) -> str:
    """The class that a configuration names, and its kind."""
    return f"{(config.architectures or [config.model_type])[0]} ({config.model_type})"


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedModel unless every trait that `config` (a PretrainedConfig) shows is supported."""
    for trait, shows in _UNSUPPORTED_TRAITS.items():
        found = shows(config)
        if found:
            raise UnsupportedModel(f"{model_name(config)} uses {trait} ({found}), which is not supported yet")


def _encoder_decoder(config: Any) -> str:
    return "is_encoder_decoder" if getattr(config, "is_encoder_decoder", False) else ""


def _not_causal(config: Any) -> str:
    if not getattr(config, "is_causal", True):
        return "is_causal: false"
    names = config.architectures or []
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return f"architectures: {', '.join(names)}"
    return ""


def _sliding_window(config: Any) -> str:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    is_used = any("sliding" in kind for kind in kinds) if kinds else getattr(config, "use_sliding_window", True)
    if window and is_used:
        return f"sliding_window: {window}"
    return ""


def _hybrid_layers(config: Any) -> str:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    kinds |= set(getattr(config, "layers_block_type", None) or ()) - {"attention"}
    if kinds:
        return f"layer_types: {', '.join(sorted(kinds))}"
    return _first_set(config, "attn_layer_indices", "ssm_cfg", "mamba_d_state", "state_size", "attention_chunk_size")


def _latent_attention(config: Any) -> str:
    return _first_set(config, "kv_lora_rank", "q_lora_rank")


def _sinks(config: Any) -> str:
    return "attention sinks" if config.model_type in ("gpt_oss",) else _first_set(config, "attention_sink")


def _soft_capping(config: Any) -> str:
    return _first_set(config, "attn_logit_softcapping", "attention_logit_softcapping")


def _position_bias(config: Any) -> str:
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "ALiBi"
    return ""


def _first_set(config: Any, *names: str) -> str:
    for name in names:
        value = getattr(config, name, None)
        if value:
            return f"{name}: {value}"
    return ""


_UNSUPPORTED_TRAITS: dict[str, Callable[[Any], str]] = {
    "an encoder-decoder": _encoder_decoder,
    "something other than causal language modelling": _not_causal,
    "hybrid layers": _hybrid_layers,
    "sliding-window attention": _sliding_window,
    "multi-head latent attention": _latent_attention,
    "attention sinks": _sinks,
    "attention soft-capping": _soft_capping,
    "attention position biases": _position_bias,
}
