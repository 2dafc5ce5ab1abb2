"""A client: what it asked for, what it got, and whether that is what the model says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from cluster.routing.router import Router
from replicas.messages import Token
from tests.simulated_cluster.prefix_model import answer
from tests.simulated_cluster.world import World


class End(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"  # an honest error
    BROKEN = "broken"  # an error that no client should get


@dataclass(slots=True)
class Client:
    """error: its status and code."""

    world: World
    generation: Generation
    end: End = End.OPEN
    error: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    router: str = ""
    ended_s: float = 0.0

    @property
    def name(self) -> str:
        return self.generation.generation_id

    async def ask(self, router: Router) -> None:
        """To whatever end."""
        spec = self.generation.spec
        self.world.trace(
            self.name, "asks: %s tokens, choices %s, %s to come, %.1f s", spec.prompt_len, spec.choices,
            spec.max_tokens, self.generation.timeout_s,
        )  # fmt: skip
        try:
            async with aclosing(router.generate(self.generation)) as batches:
                async for batch in batches:
                    for item in batch:
                        assert isinstance(item, Token)
                        self._take(item)
            self.end = End.FINISHED
        except ApiError as error:
            self.end, self.error = End.REFUSED, f"{error.status} {error.code}"
            self.world.trace(self.name, "is told: %s", error.message)
        except asyncio.CancelledError:
            self.end = End.CANCELLED
        except Exception as error:
            self.end, self.error = End.BROKEN, repr(error)
            self.world.found_wrong(self.name, "an error that is none of ours: %r", error)
        finally:
            self.ended_s = self.world.now_s
            self.world.trace(self.name, "%s %s", self.end, self.error)

    def _take(self, token: Token) -> None:
        if token.choice in self.reasons:
            self.world.found_wrong(self.name, "a token behind the end of choice %s", token.choice)
        self.tokens.setdefault(token.choice, []).append(token.token_id)
        if token.finish_reason is not None:
            self.reasons[token.choice] = token.finish_reason.value

    def check(self, versions: Collection[int]) -> None:
        """versions: of the weights, that there were: all choices must be of one of them."""
        if self.end is End.FINISHED and self.reasons.keys() != set(self.generation.spec.choices):
            self.world.found_wrong(self.name, "finished with choices %s", sorted(self.reasons))
        if not any(self._is_of(version) for version in sorted(versions)):
            self.world.found_wrong(self.name, "wrong text: %s, right is %s", self._told(), self._right(versions))

    def _is_of(self, version: int) -> bool:
        for choice, got in self.tokens.items():
            right, reason = answer(self.generation.spec, choice, version)
            if choice in self.reasons and (tuple(got), self.reasons[choice]) != (right, reason):
                return False
            if tuple(got) != right[: len(got)]:
                return False
        return True

    def _told(self) -> str:
        return "; ".join(f"{choice}: {got} {self.reasons.get(choice)}" for choice, got in self.tokens.items())

    def _right(self, versions: Collection[int]) -> str:
        spec = self.generation.spec
        return " or ".join(str([answer(spec, choice, version) for choice in spec.choices]) for version in versions)
