"""Runs in the clients' environment: log-likelihoods of a task through local-completions, and by lm-eval's hf backend.

Arguments: URL, API key, model folder. Prints one JSON object, {"server": [...], "hf": [...]}: lists of [log-likelihood,
is greedy], one for each choice of each question.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def likelihoods(model: Any) -> list[list[Any]]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path="tests/clients/lm_eval_task", include_defaults=False)
    result = simple_evaluate(model=model, tasks=["capitals"], task_manager=tasks, log_samples=True, bootstrap_iters=0)
    samples = sorted(result["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    # A response is a pair, or (in some releases) a list that has it.
    pairs = [answer[0] if isinstance(answer[0], (list, tuple)) else answer for s in samples for answer in s["resps"]]
    return [[float(logprob), str(greedy) == "True"] for logprob, greedy in pairs]


def main() -> None:
    url, key, folder = sys.argv[1:]
    os.environ["OPENAI_API_KEY"] = key
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = "SmolLM2-135M-Instruct"
    server = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=model, tokenizer=folder, tokenizer_backend="huggingface", batch_size=4
    )
    result = {"server": likelihoods(server)}
    result["hf"] = likelihoods(HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=4))
    print(json.dumps(result))


main()
