"""python -m benchmarks.gpu.golden_rules MODEL: rules of token choice, log-probabilities and beam search on the card.

One engine in float32 (SmolLM2-135M-Instruct, which the goldens are of) does everything at once: requests with rules,
greedy and sampled, against transformers' own float32 forward pass and its processors, a whole pass a token; their
log-probabilities and those of their prompts against the same; the searches of tests/golden/beam_golden.json.
Differences are printed; the exit code says whether there were any but at near ties.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.bare_engine import BareEngine, EngineSize, RecordingSender
from replicas.gguf.conversion import resolve_source
from replicas.messages import GenerationSpec, PromptLogprobs, Token, TokenLogprobs
from replicas.sampling.draw import SamplingBatch, sample
from scheduler.beam_search import BeamParams
from scheduler.lane_split import LaneObjectives
from scheduler.sampling_params import SamplingParams
from tests.replicas.rule_reference import Row, expected

_GOLDEN_FOLDER = Path(__file__).parents[2] / "tests" / "golden"
_CACHE = "/tmp/splitserve-cache"
_TOLERANCE = 1e-3  # of a log-probability; float32 sums of 30 layers in another order
_NEAR_TIE = 2e-3  # of two scores: which one wins is then a matter of that order
_NUM_TOP = 5
_STOPS = frozenset({2, 28, 30, 198})
RULES = (
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.7),
    SamplingParams(min_tokens=25, logit_bias=((28, 4.0), (30, 4.0))),
    SamplingParams(bad_words=((260,), (284, 253)), logit_bias=((284, 2.0),), repetition_penalty=1.05),
    SamplingParams(allowed_token_ids=tuple(range(17, 6000)), presence_penalty=0.2, frequency_penalty=0.1),
)


@dataclass(slots=True)
class Scored:
    """What a router would have been told of one request, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt: list[TokenLogprobs | None] = field(default_factory=list)


class ScoredSender(RecordingSender):
    """Keeps choices apart, and log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: dict[str, Scored] = {}

    def send(
        self,
        router_id: str,
        load: Any,
        admitted: Sequence[str],
        tokens: Sequence[Token],
        prompts: Sequence[PromptLogprobs] = (),
    ) -> None:
        for item in tokens:
            scored = self.scored.setdefault(item.request_id, Scored())
            scored.tokens.setdefault(item.choice, []).append(item.token_id)
            scored.logprobs.setdefault(item.choice, []).append(item.logprobs)
        for part in prompts:
            self.scored.setdefault(part.request_id, Scored()).prompt.extend(part.positions)


class Reference:
    """transformers' own model in float32, eager attention: no library kernel that rounds."""

    def __init__(self, folder: str, device: str) -> None:
        self._device = device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.to(device).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [n, V] on the host: row i is of what follows token i."""
        logits: torch.Tensor = self._model(torch.tensor([list(ids)], device=self._device), use_cache=False).logits[0]
        return logits.float().cpu()

    def first_difference(self, spec: GenerationSpec, choice: int, got: list[int]) -> str | None:
        """Where the text of a choice is not what the rules make of the reference's logits; None if nowhere.

        What follows a near tie has another history, so each token is judged by what was generated before it.
        """
        rows = self.logits([*spec.prompt_ids, *got])
        for index, token_id in enumerate(got):
            position = len(spec.prompt_ids) + index
            row = Row(spec.sampling, spec.prompt_ids, tuple(got[:index]), 0, spec.stop_token_ids)
            scores = expected(rows[position - 1], row)
            best = int(sample(scores[None].clone(), SamplingBatch.from_rows([(spec.sampling, choice, position)])))
            if best != token_id and not self._is_near_tie(scores, spec.sampling, choice, position, token_id):
                return f"token {index} is {token_id}, the reference's {best}"
        has_ended = got[-1] in spec.stop_token_ids or len(got) == spec.max_tokens
        return None if has_ended else f"ends after {len(got)} tokens"

    def _is_near_tie(
        self, scores: torch.Tensor, sampling: SamplingParams, choice: int, position: int, token_id: int
    ) -> bool:
        """Whether a change within rounding of the token's score lets the same noise choose it."""
        nudged = scores.clone()
        nudged[token_id] += _NEAR_TIE
        batch = SamplingBatch.from_rows([(sampling, choice, position)])
        return int(sample(nudged[None], batch)) == token_id


def rule_specs(prompts: list[list[int]], num_tokens: int) -> dict[str, GenerationSpec]:
    """Every rule with every prompt: greedy, and sampled with three choices; some with log-probabilities."""
    specs = {}
    for number, rule in enumerate(RULES):
        greedy = replace(rule, temperature=0.0, num_logprobs=_NUM_TOP, num_prompt_logprobs=2)
        drawn = replace(rule, temperature=0.9, top_k=60, top_p=0.97, min_p=0.01, seed=10 + number, num_logprobs=1)
        for prompt in prompts:
            for sampling, choices in ((greedy, (0,)), (drawn, (0, 1, 2))):
                stops = _STOPS if rule.min_tokens else frozenset()
                spec = GenerationSpec(tuple(prompt), choices, num_tokens, stops, sampling)
                specs[uuid.uuid4().hex] = spec
    return specs


def wrong_scores(reference: Reference, spec: GenerationSpec, scored: Scored) -> tuple[int, float]:
    """(how many log-probabilities there are, the largest difference), of tokens and prompt."""
    prompt = spec.prompt_ids
    found: list[tuple[TokenLogprobs | None, torch.Tensor, int]] = []
    for choice, tokens in scored.tokens.items():
        rows = reference.logits([*prompt, *tokens]).log_softmax(-1)
        entries = zip(scored.logprobs[choice], rows[len(prompt) - 1 :], tokens, strict=False)
        found += list(entries)
    if spec.sampling.num_prompt_logprobs is not None:
        assert len(scored.prompt) == len(prompt), "one for each token of the prompt"
        assert scored.prompt[0] is None, "nothing precedes it"
        rows = reference.logits(prompt).log_softmax(-1)
        found += list(zip(scored.prompt[1:], rows, prompt[1:], strict=False))
    worst, count = 0.0, 0
    for entry, row, token_id in found:
        assert entry is not None, "asked for"
        best = row.topk(len(entry.top)).values.tolist() if entry.top else []
        pairs = [(entry.logprob, float(row[token_id]))]
        pairs += [(logprob, float(row[top_id])) for top_id, logprob in entry.top]
        pairs += list(zip((logprob for _, logprob in entry.top), best, strict=True))
        worst = max([worst, *(abs(ours - theirs) for ours, theirs in pairs)])
        count += 1 + len(entry.top)
    return count, worst


def beam_specs(prompts: dict[str, list[int]]) -> list[tuple[GenerationSpec, list[list[int]]]]:
    """Every search of the goldens and its texts."""
    found = []
    for entry in json.loads((_GOLDEN_FOLDER / "beam_golden.json").read_text())["entries"]:
        width = entry["width"]
        beam, stops = BeamParams(width, entry["length_penalty"], entry["early_stopping"]), entry["stop_token_ids"]
        spec = GenerationSpec(
            tuple(prompts[entry["name"]]),
            tuple(range(width)),
            entry["max_tokens"],
            frozenset(stops),
            beam.sampling(len(stops)),
            beam=beam,
            num_returned=width,
        )
        found.append((spec, entry["texts"]))
    return found


def main() -> int:
    """0 when everything is the reference's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--lanes", type=int, choices=[1, 2], default=1)
    parser.add_argument("--num-searches", type=int, default=1000, help="of the goldens', the first ones")
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=32, help="of each text with rules")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = resolve_source(options.model, _CACHE)
    entries = json.loads((_GOLDEN_FOLDER / "golden.json").read_text())["entries"]
    short = [entry["prompt_ids"] for entry in entries if 8 <= len(entry["prompt_ids"]) <= 200]
    ruled = rule_specs(short[: options.num_prompts], options.num_tokens)
    of_golden = beam_specs({entry["name"]: entry["prompt_ids"] for entry in entries})[: options.num_searches]
    searches = {uuid.uuid4().hex: search for search in of_golden}
    sender = ScoredSender()
    size = EngineSize(64, 2048, 512, capacity_tokens=32_768, device=options.device)
    lanes = LaneObjectives() if options.lanes == 2 else None
    engine = BareEngine(folder, "float32", "auto", size, options.lag, sender, lanes)
    with engine:
        engine.run_specs(ruled | {request_id: spec for request_id, (spec, _) in searches.items()})
    reference = Reference(folder, options.device)
    wrong = []
    num_texts = num_scores = 0
    worst = 0.0
    for request_id, spec in ruled.items():
        scored = sender.scored[request_id]
        for choice in spec.choices:
            num_texts += 1
            difference = reference.first_difference(spec, choice, scored.tokens[choice])
            if difference is not None:
                wrong.append(f"choice {choice} of {spec.sampling}: {difference}")
        count, largest = wrong_scores(reference, spec, scored)
        num_scores, worst = num_scores + count, max(worst, largest)
    print(f"lag {options.lag}: {num_texts - len(wrong)} of {num_texts} texts with rules are the reference's")
    print(f"{num_scores} log-probabilities of tokens and prompts: largest difference {worst:.1e}")
    good = 0
    for request_id, (_, texts) in searches.items():
        got = sender.scored[request_id].tokens
        good += [got[choice] for choice in sorted(got)] == texts
    print(f"{good} of {len(searches)} beam searches are transformers' own, all of their texts")
    print("\n".join(wrong[:10]))
    return 0 if not wrong and worst <= _TOLERANCE and good == len(searches) else 1


if __name__ == "__main__":
    raise SystemExit(main())
