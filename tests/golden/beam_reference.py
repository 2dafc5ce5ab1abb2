"""What transformers' own beam search returns, as token ids."""

from __future__ import annotations

from typing import Any

import torch

from tests.golden.beam_case import BeamCase


def reference_texts(model: Any, case: BeamCase) -> dict[int, list[int]]:
    """`generate` in the model's dtype, without sampling; stop tokens included, padding not. Choice 0 is the best."""
    output = model.generate(
        torch.tensor([case.prompt_ids]),
        attention_mask=torch.ones(1, len(case.prompt_ids), dtype=torch.int64),
        num_beams=case.params.width,
        num_return_sequences=case.num_returned,
        length_penalty=case.params.length_penalty,
        early_stopping=case.params.early_stopping,
        max_new_tokens=case.max_tokens,
        eos_token_id=sorted(case.stop_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    start = len(case.prompt_ids)
    return {
        choice: ids[start : start + length]
        for choice, (ids, length) in enumerate(zip(output.sequences.tolist(), lengths, strict=True))
    }
