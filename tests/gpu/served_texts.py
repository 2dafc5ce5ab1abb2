"""What a server on a card says, judged token by token by transformers: the tests of every layout, in one place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks.gpu.golden_rules import RULES, Reference
from scheduler.generation_spec import GenerationSpec
from scheduler.sampling_params import SamplingParams
from tests.golden.golden_set import Golden, load_goldens, load_sampled_requests
from tests.gpu.served_place import Place, chosen, goldens_of
from tests.model_folder import model_folder
from tests.server.generate import golden_request, post_all
from tests.server.running_server import RunningServer

_STOPS = frozenset({2, 28, 30, 198})
_SHORT = 4  # tokens of those that make outputs look short
_TOLERANCE = 1e-3  # of a log-probability: float32 sums of 30 layers in another order
_NUM_RULE_TOKENS = 32
_Body = dict[str, Any]


def check_goldens(server: RunningServer, place: Place) -> None:
    """All at once: each text is that of transformers' generate, but for near ties of the reference."""
    goldens = chosen(place, goldens_of(place))
    answers = post_all(server, [golden_request(golden) for golden in goldens], place.num_at_once)
    ties = _check(goldens, [answer.token_ids for (answer,) in answers])
    print(f"{len(goldens)} goldens, near ties: {ties or 'none'}")
    server.wait_for_baseline(10.0)


def check_preempted(server: RunningServer, place: Place) -> None:
    """Many more at once than memory holds: some give way and come back, and every text is the same."""
    rng = random.Random(0)
    goldens = [golden for golden in goldens_of(place) if len(golden.prompt_ids) <= 600]
    picked = [rng.choice(goldens) for _ in range(place.num_requests)]
    before = server.total("splitserve_preemptions_total")
    shorts = [golden_request(goldens[0], _SHORT)] * 80  # so that outputs look short from the first on
    post_all(server, shorts, place.num_at_once)
    lengths = [_SHORT if number % 8 == 0 else 64 for number in range(place.num_requests)]
    requests = [golden_request(golden, length) for golden, length in zip(picked, lengths, strict=True)]
    answers = post_all(server, requests, place.num_at_once)
    cut = [_cut(golden, length) for golden, length in zip(picked, lengths, strict=True)]
    ties = _check(cut, [answer.token_ids for (answer,) in answers])
    num_preempted = server.total("splitserve_preemptions_total") - before
    print(f"{len(answers)} requests, {num_preempted:g} preemptions, near ties: {len(ties)}")
    assert num_preempted > 0, "nobody had to give way: nothing was tested"
    server.wait_for_baseline(30.0)


def check_choices(server: RunningServer, place: Place) -> None:
    """Sampled requests and rules of token choice: each token is what they make of the reference's logits."""
    reference = Reference(model_folder(), place.device)
    specs = [*_sampled_specs(server, place), *_rule_specs(place)]
    answers = post_all(server, [("/v1/completions", _body_of(spec)) for spec in specs], place.num_at_once)
    wrong = []
    for spec, answer in zip(specs, answers, strict=True):
        assert len(answer) == len(spec.choices)
        for choice, text in enumerate(answer):
            difference = reference.first_difference(spec, choice, text.token_ids)
            wrong += [f"choice {choice} of {spec.sampling}: {difference}"] if difference is not None else []
    print(f"{sum(len(spec.choices) for spec in specs)} texts, {len(wrong)} are not the reference's")
    assert wrong == []
    server.wait_for_baseline(10.0)


def check_logits(server: RunningServer, place: Place) -> None:
    """As far as a client sees them: log-probabilities of the chosen tokens are transformers' own."""
    reference = Reference(model_folder(), place.device)
    goldens = [golden for golden in load_goldens() if 8 <= len(golden.prompt_ids) <= 200]
    worst = 0.0
    with server.client() as client:
        for golden in chosen(place, goldens[:24]):
            body = {"prompt": golden.prompt_ids, "max_tokens": 24, "temperature": 0, "logprobs": 1}
            answer = client.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}).json()
            (choice,) = answer["choices"]
            got, ids = choice["logprobs"]["token_logprobs"], choice["token_ids"]
            rows = reference.logits([*golden.prompt_ids, *ids]).log_softmax(-1)[len(golden.prompt_ids) - 1 :]
            exact = [float(row[token]) for row, token in zip(rows, ids, strict=False)]
            worst = max([worst, *(abs(a - b) for a, b in zip(got, exact, strict=True))])
    print(f"log-probabilities: largest difference {worst:.1e}")
    assert worst <= _TOLERANCE


def check_were_handed_over(server: RunningServer) -> None:
    """Between two processes, and none was computed where it is decoded."""
    assert server.total("splitserve_kv_transfers_total", result="ready") > 0
    assert server.total("splitserve_retries_total") == 0


def check_both_lanes_ran(server: RunningServer) -> None:
    """And a card was divided: prompts had a part of it at times."""
    assert server.total("splitserve_lanes") == 2
    assert server.total("splitserve_lane_steps_total", lane="prefill") > 0
    assert server.total("splitserve_lane_steps_total", lane="decode") > 0


# -- what is asked ---------------------------------------------------------------------------------------


def _cut(golden: Golden, length: int) -> Golden:
    return replace(golden, output_ids=golden.output_ids[:length], margins=golden.margins[:length])


def _check(goldens: Sequence[Golden], texts: Sequence[list[int]]) -> list[str]:
    ties = []
    for golden, token_ids in zip(goldens, texts, strict=True):
        assert len(token_ids) == len(golden.output_ids), golden.name
        tie = golden.check(token_ids)
        ties += [f"{golden.name} at {tie.index}"] if tie is not None else []
    return ties


def _sampled_specs(server: RunningServer, place: Place) -> list[GenerationSpec]:
    specs = []
    with server.client() as client:
        for sampled in chosen(place, load_sampled_requests()):
            answer = client.post("/tokenize", json={"prompt": sampled["prompt"]})
            prompt = tuple(answer.json()["tokens"])
            sampling = SamplingParams(**{name: sampled[name] for name in ("temperature", "top_k", "top_p", "seed")})
            choices = tuple(range(sampled["n"]))
            specs.append(GenerationSpec(prompt, choices, sampled["max_tokens"], frozenset(), sampling))
    return specs


def _rule_specs(place: Place) -> list[GenerationSpec]:
    """Every rule that a client gives by token ids, greedy and drawn."""
    prompts = [tuple(g.prompt_ids) for g in load_goldens() if 8 <= len(g.prompt_ids) <= 200][: place.num_rule_prompts]
    specs = []
    for number, rule in enumerate(rule for rule in RULES if not rule.bad_words):
        drawn = replace(rule, temperature=0.9, top_k=60, top_p=0.97, min_p=0.01, seed=10 + number)
        stops = _STOPS if rule.min_tokens else frozenset()
        for prompt in prompts:
            for sampling, choices in ((replace(rule, temperature=0.0), (0,)), (drawn, (0, 1, 2))):
                specs.append(GenerationSpec(prompt, choices, _NUM_RULE_TOKENS, stops, sampling))
    return specs


def _body_of(spec: GenerationSpec) -> _Body:
    """What a client sends to have this."""
    named = {field.name: getattr(spec.sampling, field.name) for field in fields(SamplingParams)}
    for name in ("bad_words", "num_logprobs", "num_prompt_logprobs"):
        assert not named.pop(name)
    named["logit_bias"] = {str(token_id): bias for token_id, bias in spec.sampling.logit_bias}
    named["allowed_token_ids"] = list(spec.sampling.allowed_token_ids)
    asked = {name: value for name, value in named.items() if value or name in ("temperature", "seed")}
    return asked | {
        "prompt": list(spec.prompt_ids),
        "n": len(spec.choices),
        "max_tokens": spec.max_tokens,
        "stop_token_ids": sorted(spec.stop_token_ids),
        "ignore_eos": True,
        "return_token_ids": True,
    }


def allow_no_rounding() -> None:
    """Of the reference on a card."""
    torch.backends.cuda.matmul.allow_tf32 = False
