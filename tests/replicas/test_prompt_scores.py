"""Prompt scores in pieces equal a whole forward pass of transformers; there are never more logits than a piece has."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.sampling import prompt_scores
from replicas.sampling.token_scores import TokenScores
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from scheduler.token_logprobs import TokenLogprobs
from tests.engines.tiny_model import save_tiny_model, tiny_settings

CPU = torch.device("cpu")
VOCAB_SIZE = 512
PROMPTS = [[(31 * i + 7 * n) % VOCAB_SIZE for i in range(length)] for n, length in enumerate((45, 16, 1, 30))]
NUM_TOP: list[int | None] = [3, 0, 2, None]  # the last one is not asked for


def plan_of(starts: list[int], ends: list[int], is_first: bool) -> StepPlan:
    chunks = []
    for slot, (prompt, start, end) in enumerate(zip(PROMPTS, starts, ends, strict=True)):
        if start < end:
            targets = (SampleTarget(slot, 0),) if end == len(prompt) else ()
            scored = tuple(prompt[start + 1 : end + 1]) if NUM_TOP[slot] is not None else None
            chunks.append(Slice.of_prompt(f"r{slot}", slot, start, tuple(prompt[start:end]), targets, scored))
    inits = tuple(SlotInit(s, 0, SamplingParams(0.0, num_prompt_logprobs=n), None) for s, n in enumerate(NUM_TOP))
    writes = tuple(TableWrite(slot, 0, tuple(range(4 * slot, 4 * slot + 4))) for slot in range(len(PROMPTS)))
    return StepPlan(0, inits if is_first else (), writes if is_first else (), (), tuple(chunks))


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_scores_equal_a_whole_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    save_tiny_model(tmp_path)
    loaded = load_model(tiny_settings("decode", tmp_path).model, CPU)
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(16), 16, CPU), num_slots=4, max_model_len=64)
    sizes: list[int] = []
    score = TokenScores.of

    def spy(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenScores:
        sizes.append(len(logits))
        return score(logits, token_ids, num_top)

    monkeypatch.setattr(TokenScores, "of", staticmethod(spy))
    monkeypatch.setattr(prompt_scores, "LOGITS_AT_ONCE", rows_at_once * VOCAB_SIZE + 1)
    cut = [20, 16, 1, 13]
    ends = [len(prompt) for prompt in PROMPTS]
    outputs = [
        runner.launch(plan_of([0] * 4, cut, is_first=True)).result(),
        runner.launch(plan_of(cut, ends, is_first=False)).result(),
    ]
    assert [[p.request_id for p in output.prompts] for output in outputs] == [["r0", "r1", "r2"], ["r0"]]
    assert [len(output.tokens) for output in outputs] == [2, 2]
    assert max(sizes) == min(rows_at_once, 24)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for slot, num_top in enumerate(NUM_TOP[:3]):
        parts = [part for output in outputs for part in output.prompts if part.request_id == f"r{slot}"]
        positions: list[TokenLogprobs | None] = []
        for part in parts:
            assert part.start == len(positions)
            positions += part.positions
        with torch.inference_mode():
            expected = reference(torch.tensor([PROMPTS[slot]])).logits[0].log_softmax(-1)
        assert positions[0] is None
        assert len(positions) == len(PROMPTS[slot])
        for index, position in enumerate(positions[1:]):
            assert position is not None
            token_id = PROMPTS[slot][index + 1]
            assert position.logprob == pytest.approx(float(expected[index, token_id]), abs=1e-4)
            assert [t for t, _ in position.top] == expected[index].topk(num_top or 0).indices.tolist()
    # Its decoder is its own again.
    assert "forward" not in vars(loaded.model.base_model)


def test_steps_on_other_threads_notice_nothing(tmp_path: Path) -> None:
    """While hidden states are kept, and while logits are made of them, another lane runs the same modules."""
    save_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours, theirs = (torch.tensor([ids]) for ids in (PROMPTS[0], PROMPTS[3]))
    with torch.inference_mode():
        expected, others = (model(input_ids=ids, use_cache=False).logits[0] for ids in (ours, theirs))

    def run_theirs(*_: object) -> None:
        def run() -> None:
            with torch.inference_mode():
                seen.append(model(input_ids=theirs, use_cache=False).logits[0])

        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=run)
            other.start()
            other.join()

    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        with prompt_scores.KeptHiddenStates(model) as hidden:
            model(input_ids=ours, use_cache=False)
            run_theirs()
        hook = model.lm_head.register_forward_pre_hook(run_theirs)
        found = hidden.logits(torch.arange(len(PROMPTS[0])))
        hook.remove()
    assert len(seen) == 2
    for logits in seen:
        torch.testing.assert_close(logits, others)
    torch.testing.assert_close(found, expected)
