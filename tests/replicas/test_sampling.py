"""Sampling: kept sets equal transformers', draws follow the distribution, rows do not disturb each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from replicas.sampling.draw import (
    GREEDY_BELOW,
    RowGroup,
    SamplingBatch,
    _scale,
    _threshold,
    gumbel_from_words,
    sample,
)
from replicas.sampling.philox import token_noise
from scheduler.sampling_params import SamplingParams

Row = tuple[SamplingParams, int, int]


def logits_of(seed: int, num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    tokens = sample(logits, SamplingBatch.from_rows(rows))
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(rows),)
    result: list[int] = tokens.tolist()
    return result


def reference_kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which tokens transformers' warpers keep: bool [R, V]."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return scores > -torch.inf


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    batch = SamplingBatch.from_rows([(params, 0, 0)] * len(logits))
    scores = _scale(logits, batch.temperature.unsqueeze(1))
    return scores >= _threshold(scores, batch.top_k, batch.top_p)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 50, 999, 1000, 5000])
def test_kept_set_equals_transformers(temperature: float, top_k: int) -> None:
    logits = logits_of(1, 6, 1000)
    for top_p in (0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0):
        params = SamplingParams(temperature, top_k, top_p)
        assert torch.equal(kept(logits, params), reference_kept(logits, params)), top_p


def test_kept_set_equals_transformers_at_full_vocabulary() -> None:
    logits = logits_of(2, 4, 49152)
    for params in (SamplingParams(0.8, 0, 0.95), SamplingParams(1.0, 200, 0.9), SamplingParams(1.3, 40, 1.0)):
        assert torch.equal(kept(logits, params), reference_kept(logits, params))


def test_ties_with_the_least_likely_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    top_k = SamplingParams(1.0, top_k=2)
    assert kept(logits, top_k).tolist() == [[False, True, True, True, True, False]]
    assert torch.equal(kept(logits, top_k), reference_kept(logits, top_k))
    top_p = SamplingParams(1.0, top_p=0.6)  # the first needs one of the three; transformers picks some
    assert kept(logits, top_p).tolist() == [[False, True, True, True, True, False]]
    assert bool((kept(logits, top_p) >= reference_kept(logits, top_p)).all())


def test_a_draw_from_few_tokens_is_that_from_all_with_the_others_forbidden() -> None:
    """Noise is made for the kept tokens alone where there are few: the same noise."""
    for top_p, top_k, min_p in ((0.9, 0, 0.0), (1.0, 20, 0.0), (0.5, 40, 0.1), (1.0, 0, 0.2), (1.0, 1, 0.0)):
        logits = logits_of(9, 8, 5003)
        logits[0, :4000] = -torch.inf
        temperature = [0.0 if row == 5 else 0.5 + row / 4 for row in range(8)]
        rows: list[Row] = [(SamplingParams(t, top_k, top_p, row, min_p), 0, row) for row, t in enumerate(temperature)]
        batch = SamplingBatch.from_rows(rows)
        scores = _scale(logits, batch.temperature.unsqueeze(1))
        scores[scores < batch.min_p.log().unsqueeze(1)] = -torch.inf
        scores[scores < _threshold(scores, batch.top_k, batch.top_p)] = -torch.inf
        noise = token_noise(batch.seed, batch.choice, batch.position, 5003)
        gumbel = gumbel_from_words(noise) * (batch.temperature >= GREEDY_BELOW).unsqueeze(1)
        for groups in (batch.groups, (RowGroup(None, filtered=True, has_min_p=True),)):
            drawn = sample(logits, replace(batch, groups=groups))
            assert torch.equal(drawn, (scores + gumbel).argmax(dim=-1))


def test_filtered_tokens_are_never_drawn() -> None:
    logits = logits_of(3, 1, 500).expand(400, -1).contiguous()
    for params in (SamplingParams(3.0, top_k=5, seed=1), SamplingParams(3.0, top_p=0.2, seed=2)):
        allowed = set(reference_kept(logits[:1], params)[0].nonzero().flatten().tolist())
        drawn = set(draw(logits, [(params, 0, position) for position in range(400)]))
        assert drawn <= allowed
        assert len(drawn) > 3


def chi_square(drawn: list[int], probabilities: list[float]) -> tuple[float, int]:
    """(statistic, degrees of freedom), tokens expected fewer than 5 times pooled."""
    counts = [0] * len(probabilities)
    for token in drawn:
        counts[token] += 1
    expected = [p * len(drawn) for p in probabilities]
    cells = [(c, e) for c, e in zip(counts, expected, strict=True) if e >= 5]
    rest = [(c, e) for c, e in zip(counts, expected, strict=True) if e < 5]
    if sum(e for _, e in rest) >= 5:
        cells.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    else:
        assert sum(c for c, _ in rest) < 20
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


def chi_square_limit(degrees: int) -> float:
    """About the 99.9th percentile (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=11),
        SamplingParams(0.6, seed=-12),
        SamplingParams(1.5, top_k=20, seed=2**63 - 1),
        SamplingParams(1.0, top_p=0.8, seed=14),
        SamplingParams(0.9, top_k=30, top_p=0.95, seed=15),
    ],
)
def test_draws_follow_the_softmax(params: SamplingParams) -> None:
    check_draws(params, "position")


@pytest.mark.parametrize("vary", ["choice", "seed"])
def test_draws_over_choices_and_seeds_follow_the_softmax(vary: str) -> None:
    check_draws(SamplingParams(0.8, seed=21), vary)


def check_draws(params: SamplingParams, vary: str) -> None:
    num_draws = 10_000
    logits = logits_of(4, 1, 60) / 2
    scores = (logits / params.temperature).masked_fill(~reference_kept(logits, params), -torch.inf)
    rows: list[Row] = []
    for i in range(num_draws):
        seed = params.seed + i if vary == "seed" else params.seed
        row_params = SamplingParams(params.temperature, params.top_k, params.top_p, seed)
        rows.append((row_params, i if vary == "choice" else 3, i if vary == "position" else 9))
    statistic, degrees = chi_square(draw(logits.expand(num_draws, -1), rows), scores.softmax(-1)[0].tolist())
    assert statistic < chi_square_limit(degrees)


def test_batch_composition_does_not_change_a_row() -> None:
    logits = logits_of(5, 40, 3000)
    parameters = [
        SamplingParams(0.0),
        SamplingParams(1.0, seed=3),
        SamplingParams(0.7, top_k=50, seed=4),
        SamplingParams(1.2, top_p=0.9, seed=5),
        SamplingParams(0.9, top_k=100, top_p=0.8, seed=-6),
    ]
    rows: list[Row] = [(parameters[row % 5], row % 3, 100 + row) for row in range(40)]
    alone = [draw(logits[row : row + 1], rows[row : row + 1])[0] for row in range(40)]
    assert draw(logits, rows) == alone
    assert draw(logits.flip(0), rows[::-1]) == alone[::-1]
    assert draw(logits[1::5], rows[1::5]) == alone[1::5]
    assert draw(logits[:7], rows[:7]) == alone[:7]


def test_every_row_in_one_group_is_the_same() -> None:
    """What a runner with fixed shapes does."""
    logits = logits_of(6, 9, 300)
    parameters = [SamplingParams(0.0), SamplingParams(1.0, seed=3), SamplingParams(0.7, 5, 0.9, 4)]
    batch = SamplingBatch.from_rows([(parameters[row % 3], 0, row) for row in range(9)])
    assert torch.equal(
        sample(logits, replace(batch, groups=(RowGroup(None, filtered=True, has_min_p=True),))), sample(logits, batch)
    )


def test_seed_choice_and_position_each_change_the_noise() -> None:
    def noise(seed: int, choice: int, position: int) -> torch.Tensor:
        return token_noise(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]), 4096)

    base = noise(1, 2, 3)
    for other in (noise(2, 2, 3), noise(1 + 2**32, 2, 3), noise(1, 3, 3), noise(1, 2, 4), noise(1, 3, 2)):
        assert int((base == other).sum()) <= 2
    flat = torch.zeros(64, 1000)
    params = SamplingParams(1.0, seed=1)
    assert len(set(draw(flat, [(params, choice, 0) for choice in range(64)]))) > 50
    assert len(set(draw(flat, [(params, 0, position) for position in range(64)]))) > 50
    assert draw(flat, [(params, 0, 5)] * 64) == draw(flat[:1], [(params, 0, 5)]) * 64


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-9, 9e-6])
def test_tiny_temperatures_are_greedy_and_ties_take_the_lowest_id(temperature: float) -> None:
    logits = logits_of(7, 8, 400)
    logits[0, [5, 77, 300]] = 50.0
    rows: list[Row] = [(SamplingParams(temperature, 0, 1.0, row), 0, row) for row in range(8)]
    assert draw(logits, rows) == logits.argmax(-1).tolist()
    assert draw(logits, rows)[0] == 5


def test_low_temperature_picks_the_most_likely_token() -> None:
    logits = logits_of(8, 8, 400)
    rows: list[Row] = [(SamplingParams(1e-4, 0, 0.9, row), 0, row) for row in range(8)]
    assert draw(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 1e6])
def test_extreme_logits_are_safe(top_k: int, top_p: float, temperature: float) -> None:
    infinity = torch.inf
    logits = torch.tensor(
        [
            [-infinity, 1.0, -infinity, 2.0, -infinity, -infinity],
            [-infinity, -infinity, -infinity, -infinity, 0.0, -infinity],
            [1e30, -1e30, 1e30, -1e30, 0.0, -infinity],
            [-1e30, -1e30, -2e30, -3e30, -3.4e38, -infinity],
            [3.4e38, -3.4e38, 0.0, 1.0, 2.0, 3.0],
            [0.0, infinity, 0.0, 1.0, -infinity, 3.0],
            [-infinity] * 6,
            [0.0] * 6,
        ]
    )
    allowed = [{1, 3}, {4}, {0, 2}, {0, 1}, {0}, {1}, set(range(6)), set(range(6))]
    for position in range(20):
        rows: list[Row] = [(SamplingParams(temperature, top_k, top_p, 5), 0, position)] * len(logits)
        for token, tokens in zip(draw(logits, rows), allowed, strict=True):
            assert token in tokens


def test_nan_logits_are_chosen_so_that_they_are_seen_and_harm_no_other_row() -> None:
    logits = logits_of(9, 3, 100)
    clean = logits.clone()
    logits[1, 40] = torch.nan
    for params in (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, 5, 0.9)):
        rows: list[Row] = [(params, 0, row) for row in range(3)]
        tokens = draw(logits, rows)
        assert tokens[1] == 40
        assert tokens[::2] == draw(clean, rows)[::2]


def test_gumbel_noise_is_finite_and_resolved_where_it_wins() -> None:
    words = torch.tensor([0, 1, 2, 3, 2**31, 2**32 - 2, 2**32 - 1])
    gumbel = gumbel_from_words(words)
    assert bool(gumbel.isfinite().all())
    assert bool((gumbel.diff()[:4] < 0).all())
    exact = [-math.log(-math.log1p(-(word + 0.5) * 2.0**-32)) for word in words[:5].tolist()]
    assert gumbel[:5].tolist() == pytest.approx(exact, rel=1e-6)


def test_logits_are_not_changed_and_an_empty_batch_is_empty() -> None:
    logits = logits_of(10, 4, 100)
    before = logits.clone()
    draw(logits, [(SamplingParams(0.7, 5, 0.9, 1), 0, 0)] * 4)
    assert torch.equal(logits, before)
    assert draw(torch.empty(0, 100), []) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_integers_and_tokens_without_synchronising() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, 12345])
    cpu_noise = token_noise(seeds, seeds & 3, seeds & 1023, 49155)
    cuda = seeds.cuda()
    assert torch.equal(token_noise(cuda, cuda & 3, cuda & 1023, 49155).cpu(), cpu_noise)
    logits = logits_of(11, 64, 49155)
    parameters = [
        SamplingParams(0.0),
        SamplingParams(1.0, seed=3),
        SamplingParams(0.7, 50, 1.0, 4),
        SamplingParams(0.9, 0, 0.9, 5),
    ]
    rows: list[Row] = [(parameters[row % 4], 0, row) for row in range(64)]
    batch, on_cuda = SamplingBatch.from_rows(rows, "cuda"), logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(on_cuda, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # log and softmax differ in the last bit between devices: a near tie may fall the other way.
    assert sum(a != b for a, b in zip(tokens.tolist(), draw(logits, rows), strict=True)) <= 1
