"""Prompts whose KV is on its way here: what drafts for them can be got ready meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.model.model_runner import ModelRunner
from scheduler.request import Request


def expect_prompts(runner: ModelRunner, admitted: Iterable[Request]) -> None:
    """Tell the runner of those that it may make drafts for. What comes running is longer than its prompt when it is
    here."""
    for request in admitted:
        is_prompt = request.sequences and not request.local_prefill and not request.num_generated
        if request.is_drafted_for and is_prompt:
            runner.expect(request.sequences[0].slot, request.spec.prompt_ids)
