"""What rounding the bundled model's weights at load costs: a little, and as much as is written in docs/models.md."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.quantised import golden_ids, model_of, perplexity
from tests.model_folder import model_folder

_NUM_TOKENS = 257


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("int8", 1.02), ("fp8", 1.05), ("int4", 1.3)])
def test_perplexity_over_a_fixed_text(kind: str, most: float) -> None:
    """A wrong scale or order of weights makes it ten times as large."""
    torch.set_num_threads(1)
    ids = golden_ids(model_folder())[:_NUM_TOKENS]
    exact = perplexity(model_of("none", model_folder()), ids)
    assert exact == pytest.approx(33, abs=12), "of English"
    assert 0.95 < perplexity(model_of(kind, model_folder()), ids) / exact < most
