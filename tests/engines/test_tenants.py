"""Two tenants in front of one system: nobody finds what another has sent, and nothing that is counted tells of it.

What a stranger could measure is time; what takes time is counted here instead: tokens computed and bytes moved. A guess
that is right must cost to the last token and byte what one costs that is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from cluster.openai.caller import Caller
from tests.engines.local_system import LocalSystem
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings

BLOCK_SIZE = 16
NUM_TOKENS = 3


@dataclass(frozen=True)
class Cost:
    """Of one request: what its usage says was found, prompt tokens computed by all engines, bytes of KV moved."""

    found: int
    computed: int
    moved: int


class Tenants:
    """A system, and prompts that nobody has sent yet."""

    def __init__(self, system: LocalSystem) -> None:
        self._system = system
        self._rng = random.Random(20)

    def text(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(512) for _ in range(num_tokens)]

    def ask(self, tenant: str, prompt: list[int], asked: str | None = None, use_cache: bool = True) -> Cost:
        """tenant: "" for one that is not told apart. asked: the body's cache_salt."""
        salt = Caller("", tenant.encode().ljust(16, b"-") if tenant else b"").cache_salt(asked)
        generation = self._system.generation(prompt, NUM_TOKENS)
        spec = replace(generation.spec, cache_salt=salt, use_cache=use_cache)
        generation = replace(generation, spec=spec)
        before = self._counted()
        (generated,) = self._system.run([generation])
        assert len(generated.token_ids[0]) == NUM_TOKENS
        computed, moved = (now - then for now, then in zip(self._counted(), before, strict=True))
        return Cost(generation.finding.num_tokens, computed, moved)

    def _counted(self) -> tuple[int, int]:
        engines = self._system.engines
        computed = sum(built.engine.steps.num_prefilled_tokens for built in engines)
        return computed, sum(built.transfers.snapshot().bytes_read for built in engines)


@pytest.fixture(scope="module", params=["split", "colocated"])
def tenants(request: pytest.FixtureRequest, tiny_goldens: TinyGoldens) -> Iterator[Tenants]:
    prefill = tiny_settings("prefill", tiny_goldens.folder) if request.param == "split" else None
    system = LocalSystem(tiny_settings("decode", tiny_goldens.folder), prefill)
    yield Tenants(system)
    system.close()


def is_miss(cost: Cost, prompt: list[int]) -> bool:
    return (cost.found, cost.computed) == (0, len(prompt))


def is_hit(cost: Cost, prompt: list[int]) -> bool:
    """All whole blocks in front of the last token are found, and only what follows them is computed."""
    found = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    return (cost.found, cost.computed) == (found, len(prompt) - found)


@pytest.mark.parametrize("length", [16 * 5, 16 * 5 + 1, 16 * 6 - 1])
def test_who_has_sent_it_finds_it_and_nobody_else(tenants: Tenants, length: int) -> None:
    prompt = tenants.text(length)
    for tenant in ("a", "b", "c", ""):
        assert is_miss(tenants.ask(tenant, prompt), prompt), tenant
        assert is_hit(tenants.ask(tenant, prompt), prompt), tenant
    for tenant in ("", "c", "b", "a"):
        assert is_hit(tenants.ask(tenant, prompt), prompt), tenant


@pytest.mark.slow
def test_a_right_guess_costs_what_a_wrong_one_does(tenants: Tenants) -> None:
    """Row C14: around each block's end of a text that another tenant has sent, answered and sent again."""
    secret = tenants.text(16 * 12)
    tenants.ask("a", secret)
    assert is_hit(tenants.ask("a", secret), secret)
    for number, length in enumerate(16 * blocks + more for blocks in range(1, 13) for more in (-1, 0, 1)):
        tail = tenants.text(7)
        right = tenants.ask(f"spy {number}", secret[:length] + tail)
        wrong = tenants.ask(f"other {number}", tenants.text(min(length, len(secret))) + tail)
        assert right == wrong, (length, right, wrong)
        assert right.found == 0
        assert is_hit(tenants.ask("a", secret), secret), "it is still there to be found"


def test_a_spy_that_guesses_on_finds_its_own_guesses_only(tenants: Tenants) -> None:
    """A guess that is made longer word by word: each finds the one before it, whether or not a text of another begins
    so."""
    secret, other = tenants.text(16 * 8), tenants.text(16 * 8)
    tenants.ask("a", secret)
    lengths = range(20, 16 * 8, 9)
    right = [tenants.ask("spy", secret[:length]) for length in lengths]
    wrong = [tenants.ask("spy", other[:length]) for length in lengths]
    assert right == wrong
    assert max(cost.found for cost in right) > 0


def test_a_body_s_salt_divides_a_tenant(tenants: Tenants) -> None:
    prompt = tenants.text(100)
    for tenant in ("a", "b", ""):
        for asked in (None, "x", "y"):
            assert is_miss(tenants.ask(tenant, prompt, asked), prompt), (tenant, asked)
            assert is_hit(tenants.ask(tenant, prompt, asked), prompt), (tenant, asked)
    assert is_hit(tenants.ask("a", prompt, "x"), prompt)


def test_a_common_beginning_is_shared_within_a_tenant(tenants: Tenants) -> None:
    system_prompt = tenants.text(64)
    one, two = system_prompt + tenants.text(40), system_prompt + tenants.text(40)
    assert is_miss(tenants.ask("a", one), one)
    assert tenants.ask("a", two).found == 64
    assert is_miss(tenants.ask("b", two), two)


def test_who_may_not_use_what_is_kept_computes_all_of_it(tenants: Tenants) -> None:
    prompt = tenants.text(100)
    tenants.ask("a", prompt)
    assert is_miss(tenants.ask("a", prompt, use_cache=False), prompt)
    assert is_hit(tenants.ask("a", prompt), prompt)
