"""Prompts whose KV is on its way here: what drafts for them can be got ready meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.model.model_runner import ModelRunner
from scheduler.request import Request


def expect_prompts(runner: ModelRunner, admitted: Iterable[Request]) -> None:
    """Tell the runner of those that it may make drafts for."""
    for request in admitted:
        if request.is_drafted_for and request.sequences and not request.local_prefill:
            runner.expect(request.sequences[0].slot, request.spec.prompt_ids)
