"""The output head in another order in memory computes the same, and what is tied to it stays tied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from replicas.layers.output_head import WideLinear
from replicas.layers.replaced_layers import before_serving, replace_layers


def replaced_heads(model: Any) -> int:
    return replace_layers(model, before_serving(torch.device("cpu"))).made["wide_head"]


def tiny_llama(**changes: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **changes,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_same_logits_and_the_same_greedy_tokens(tie_word_embeddings: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tie_word_embeddings)
    ids = torch.tensor([[5, 17, 3, 88, 41, 60, 9]])
    logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=32, do_sample=False)
    embeddings = model.get_input_embeddings().weight.clone()

    assert replaced_heads(model) == 1

    assert model.lm_head.weight.stride() == (1, 97)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tie_word_embeddings
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.generate(ids, max_new_tokens=32, do_sample=False), tokens)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3), (2, 2), (5,), (0,), (2, 3)])
def test_any_number_of_rows(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 2500, bias=bias)
    head = WideLinear(linear.weight, linear.bias)
    x = torch.randn(*shape, 8)
    torch.testing.assert_close(head(x), nn.functional.linear(x, head.weight, head.bias), rtol=1e-5, atol=1e-6)


def test_other_heads_are_left_alone() -> None:
    class Scaled(nn.Linear):
        pass

    model = tiny_llama(tie_word_embeddings=False)
    model.lm_head = Scaled(32, 97, bias=False)
    assert replaced_heads(model) == 0
    assert type(model.lm_head) is Scaled
