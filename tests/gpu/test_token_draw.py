"""Drawing on the GPU is the same function as `replicas.sampling.draw`."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from replicas.kernels.slot_columns import BLOCK_TABLE, LAST_TOKEN, sampling_columns
from replicas.sampling.draw import SamplingBatch, sample
from scheduler.sampling_params import SamplingParams

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.token_draw import draw_tokens
from replicas.kernels.token_mask import forbid_tokens
from replicas.kernels.token_pick import pick_tokens, picks

pytestmark = pytest.mark.interpreted


def draw(
    logits: torch.Tensor,
    rows: list[tuple[SamplingParams, int, int]],
    most_kept: int = 0,
    mask_places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of (parameters, choice, position of the token) per row, and the state afterwards."""
    state = torch.zeros(len(rows) + 1, BLOCK_TABLE + 1, dtype=torch.int64)
    slots = torch.randperm(len(rows))
    for (params, _, _), slot in zip(rows, slots, strict=True):
        for column, value in sampling_columns(params).items():
            state[slot, column] = value
    state = state.to(logits.device)
    positions = torch.tensor([position - 1 for _, _, position in rows], dtype=torch.int32, device=logits.device)
    choices = torch.tensor([choice for _, choice, _ in rows], dtype=torch.int32, device=logits.device)
    tokens = draw_tokens(
        logits, state, slots.int().to(logits.device), positions, choices, most_kept=most_kept, mask_places=mask_places
    )
    return tokens, state[slots.to(logits.device), LAST_TOKEN]


def random_rows(count: int, seed: int) -> list[tuple[SamplingParams, int, int]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 5, 50, 10**6]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
            seed=rng.randrange(2**64),
        )
        rows.append((params, rng.randrange(4), rng.randrange(1, 5000)))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [5, 1000, 9001])
def test_equals_the_reference_in_any_mix(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    count = 256 if device.type == "cuda" else 24
    logits = (4 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(vocab_size))).to(dtype)
    rows = random_rows(count, vocab_size)
    expected = sample(logits.float(), SamplingBatch.from_rows(rows))
    tokens, last = draw(logits.to(device), rows)
    # A sum in another order may move a threshold that lies on it: seldom, and only with top-p.
    differing = [row for row in range(count) if tokens[row] != expected[row]]
    assert len(differing) <= count // 100, differing
    assert all(rows[row][0].top_p < 1.0 for row in differing)
    assert torch.equal(last, tokens)


def rows_of_few(count: int, seed: int, most_kept: int) -> list[tuple[SamplingParams, int, int]]:
    """Greedy ones among them."""
    rng = random.Random(seed)
    rows = []
    for params, choice, position in random_rows(count, seed):
        top_k = rng.choice([1, 2, most_kept // 2, most_kept]) if params.temperature else params.top_k
        rows.append((replace(params, top_k=top_k), choice, position))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "most_kept"), [(1000, 8), (9001, 24)])
@pytest.mark.parametrize("kind", ["spread", "close", "equal"])
def test_rows_that_keep_few_equal_the_reference(
    device: torch.device, dtype: torch.dtype, vocab_size: int, most_kept: int, kind: str
) -> None:
    """close: many tokens are as likely as the last one to keep; equal: all are, more than there is room to gather."""
    count = 128 if device.type == "cuda" else 12
    noise = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = {"spread": 4 * noise, "close": (noise / 2).round(), "equal": torch.full_like(noise, 1.5)}[kind].to(dtype)
    rows = rows_of_few(count, vocab_size, most_kept)
    num_pieces = 16 * -(-vocab_size // 4096)
    assert picks(most_kept, num_pieces)
    expected = sample(logits.float(), SamplingBatch.from_rows(rows))
    tokens, last = draw(logits.to(device), rows, most_kept)
    differing = [row for row in range(count) if tokens[row] != expected[row]]
    assert len(differing) <= count // 100, differing
    assert all(rows[row][0].top_p < 1.0 for row in differing)
    assert torch.equal(last, tokens)


def test_what_the_host_takes_for_greedy_is_greedy(device: torch.device) -> None:
    """Rounded to float32 this temperature is the bound, which samples."""
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(5)).bfloat16()
    rows = [(SamplingParams(temperature=9.9999997e-06, seed=1), 0, 9), (SamplingParams(top_k=5, seed=2), 0, 9)]
    expected = sample(logits.float(), SamplingBatch.from_rows(rows))
    tokens, _ = draw(logits.to(device), rows, 5)
    assert tokens.tolist() == expected.tolist()
    assert expected[0] == logits[0].argmax()


@pytest.mark.parametrize("most_kept", [0, 5])
def test_a_negative_zero_is_as_likely_as_zero(device: torch.device, most_kept: int) -> None:
    logits = torch.where(torch.arange(9000) % 3 == 0, 0.0, -0.0).repeat(16, 1).bfloat16()
    params = [
        SamplingParams(temperature=1.0, top_k=5, top_p=top_p, seed=seed) for seed in range(8) for top_p in (1.0, 0.3)
    ]
    rows = [(one, 0, 7) for one in params]
    expected = sample(logits.float(), SamplingBatch.from_rows(rows))
    tokens, _ = draw(logits.to(device), rows, most_kept)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too long for the interpreter")
def test_equals_the_reference_at_full_vocabulary(device: torch.device) -> None:
    logits = torch.randn(128, 128_256, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = random_rows(128, 3)
    expected = sample(logits.float(), SamplingBatch.from_rows(rows))
    tokens, _ = draw(logits.to(device), rows)
    assert int((tokens.cpu() != expected).sum()) <= 1
    rows = rows_of_few(128, 4, 200)
    expected = sample(logits.float(), SamplingBatch.from_rows(rows))
    tokens, _ = draw(logits.to(device), rows, 200)
    assert int((tokens.cpu() != expected).sum()) <= 1


def test_greedy_takes_the_lowest_of_equal_ids(device: torch.device) -> None:
    logits = torch.zeros(2, 9000)
    logits[1, [4999, 5000, 123]] = 7.0
    tokens, _ = draw(logits.to(device), [(SamplingParams(temperature=0.0), 0, 1)] * 2)
    assert tokens.tolist() == [0, 123]


def test_what_is_no_number_is_no_token(device: torch.device) -> None:
    logits = torch.randn(5, 6000)
    logits[0, 5555] = torch.nan
    logits[1] = -torch.inf
    logits[2, :5999] = -torch.inf
    logits[3, 17] = torch.inf
    rows = [(SamplingParams(temperature=t, seed=3), 0, 9) for t in (0.0, 1.0, 1.0, 1.0, 0.0)]
    tokens, last = draw(logits.to(device), rows)
    assert tokens[[0, 1, 3]].tolist() == [-1, -1, -1]
    assert tokens[2] == 5999
    assert tokens[4] == logits[4].argmax()
    assert last.tolist() == tokens.clamp(min=0).tolist()


def test_padding_rows_leave_their_slot_alone(device: torch.device) -> None:
    state = torch.zeros(3, BLOCK_TABLE + 1, dtype=torch.int64, device=device)
    state[2, LAST_TOKEN] = 77
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([4, -1], dtype=torch.int32, device=device)
    logits = torch.randn(2, 100, device=device)
    tokens = draw_tokens(logits, state, slots, positions, torch.zeros_like(slots))
    assert state[1, LAST_TOKEN] == tokens[0] == logits[0].argmax()
    assert state[2, LAST_TOKEN] == 77


def random_masks(count: int, vocab_size: int, seed: int) -> tuple[list[int], torch.Tensor]:
    """Rows that have one, and bool [n, vocab_size]: of one token, of few, of half and of all but one."""
    rng = random.Random(seed)
    rows = sorted(rng.sample(range(count), 2 * count // 3))
    allowed = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for place in range(len(rows)):
        num = (1, min(7, vocab_size), (vocab_size + 1) // 2, vocab_size - 1)[place % 4]
        allowed[place, rng.sample(range(vocab_size), num)] = True
    return rows, allowed


def packed(allowed: torch.Tensor, num_spare_words: int) -> torch.Tensor:
    """As llguidance writes them; a tokenizer may know more tokens than the model, whose bits count for nothing."""
    count, vocab_size = allowed.shape
    bits = np.ones((count, 32 * (-(-vocab_size // 32) + num_spare_words)), dtype=np.uint8)
    bits[:, :vocab_size] = allowed.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "num_spare_words", "most_kept"), [(5, 0, 0), (1000, 3, 8), (9001, 1, 0)])
def test_masked_rows_equal_the_reference(
    device: torch.device, dtype: torch.dtype, vocab_size: int, num_spare_words: int, most_kept: int
) -> None:
    """Greedy, sampled, filtered, by the search and by the pick; rows without a mask draw what they would."""
    count = 256 if device.type == "cuda" else 24
    logits = (4 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(vocab_size))).to(dtype)
    rows = rows_of_few(count, vocab_size, most_kept) if most_kept else random_rows(count, vocab_size)
    masked_rows, allowed = random_masks(count, vocab_size, vocab_size)
    forbidden = torch.zeros(count, vocab_size, dtype=torch.bool)
    forbidden[masked_rows] = ~allowed
    expected = sample(logits.float().masked_fill(forbidden, -torch.inf), SamplingBatch.from_rows(rows))
    on_device = logits.clone().to(device)
    mask_places = torch.full((count,), -1, dtype=torch.int32)
    mask_places[masked_rows] = torch.arange(len(masked_rows), dtype=torch.int32)
    mask_places = mask_places.to(device)
    forbid_tokens(on_device, packed(allowed, num_spare_words).to(device), mask_places)
    assert torch.equal(on_device.cpu().float(), logits.float().masked_fill(forbidden, -torch.inf))
    tokens, last = draw(on_device, rows, most_kept, mask_places)
    differing = [row for row in range(count) if tokens[row] != expected[row]]
    assert len(differing) <= count // 100, differing
    assert torch.equal(last, tokens)
    assert all(bool(allowed[place, tokens[row]]) for place, row in enumerate(masked_rows))


def test_a_mask_that_leaves_nothing_is_told_from_what_is_no_number(device: torch.device) -> None:
    logits = torch.randn(4, 6000)
    logits[1, 17] = torch.nan
    logits[2] = -torch.inf
    words = torch.zeros(2, 188, dtype=torch.int32)
    words[1, 0] = 1 << 17  # the only token it allows is no number
    on_device = logits.to(device)
    mask_places = torch.tensor([0, 1, -1, -1], dtype=torch.int32, device=device)
    forbid_tokens(on_device, words.to(device), mask_places)
    rows = [(SamplingParams(temperature=t, seed=3), 0, 9) for t in (1.0, 0.0, 1.0, 0.0)]
    tokens, last = draw(on_device, rows, mask_places=mask_places)
    assert tokens[:3].tolist() == [-2, -1, -1]
    assert tokens[3] == logits[3].argmax()
    assert last[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_allowed", [1, 3, 20])
def test_what_a_mask_forbids_is_not_looked_at(device: torch.device, dtype: torch.dtype, num_allowed: int) -> None:
    """Also where it allows fewer tokens than top-k keeps: those looked at are those of the pieces that have a maximum.
    Else a program would go through the whole vocabulary. Elsewhere there stands what would be chosen at once."""
    vocab_size, most_kept, count = 9001, 24, 8
    num_blocks = -(-vocab_size // 4096)
    logits = torch.full((count, vocab_size), -torch.inf, dtype=dtype)
    rng = random.Random(num_allowed)
    for row in range(count):
        logits[row, rng.sample(range(vocab_size), num_allowed)] = torch.randn(num_allowed).to(dtype)
    padded = torch.nn.functional.pad(logits.float(), (0, 4096 * num_blocks - vocab_size), value=-torch.inf)
    piece_maxima = padded.view(count, -1, 256).amax(2)
    is_seen = piece_maxima.repeat_interleave(256, 1)[:, :vocab_size] > -torch.inf
    lures = torch.where(is_seen, logits, torch.full_like(logits, 100.0))
    state = torch.zeros(count, BLOCK_TABLE + 1, dtype=torch.int64)
    params = SamplingParams(temperature=1.0, top_k=most_kept, top_p=0.9, seed=7)
    for column, value in sampling_columns(params).items():
        state[:, column] = value
    numbers = torch.arange(count, dtype=torch.int32)
    expected = sample(logits.float(), SamplingBatch.from_rows([(params, 0, row + 1) for row in range(count)]))
    tokens = pick_tokens(
        lures.to(device), piece_maxima.to(device), padded.view(count, num_blocks, -1).amax(2).to(device),
        state.to(device), numbers.to(device), numbers.to(device), torch.zeros_like(numbers).to(device),
        {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}[dtype],
    )  # fmt: skip
    assert tokens[:, 0].tolist() == expected.tolist()
