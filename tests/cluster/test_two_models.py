"""Replicas of two models side by side, as in an update: each request is answered by one of them, whole.

The fake replicas' tokens depend on their model, and they refuse KV of another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.policies.routing_policy import PrefillCandidate
from cluster.routing.generation import Generation
from cluster.routing.model_binding import ModelBinding
from replicas.model_identity import ModelIdentity
from tests.cluster.fake_model import PLAIN, Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

A = str(ModelIdentity("aaaa", "c", "t", "float32", kv="kv"))
B = str(ModelIdentity("bbbb", "c", "t", "float32", kv="kv"))
STRANGER = str(ModelIdentity("aaaa", "c", "t2", "float32", kv="kv"))
OTHER_LAYOUT = str(ModelIdentity("aaaa", "c", "t", "float32", kv="kv2"))
SLOW = Script(token_s=0.01)


def cluster_of(prefill: str, decode: str) -> FakeCluster:
    """A letter for each replica's model."""
    cluster = FakeCluster(num_decode=len(decode), num_prefill=len(prefill))
    assert cluster.prefill is not None
    for letters, pool in ((prefill, cluster.prefill), (decode, cluster.decode)):
        for letter, replica in zip(letters, pool.members.values(), strict=True):
            replica.fingerprint = {"a": A, "b": B, "s": STRANGER, "l": OTHER_LAYOUT}[letter]
    return cluster


def join(rig: Rig, pool: str, replica_id: str, fingerprint: str) -> None:
    of = rig.cluster.decode if pool == "decode" else rig.cluster.prefill
    assert of is not None
    of.join(replica_id).fingerprint = fingerprint
    rig.router.pools_changed(rig.cluster.decode.replicas())


def unlike(rig: Rig) -> Mapping[tuple[str, str], float]:
    (family,) = (f for f in rig.metrics.snapshot() if f["name"] == "splitserve_unlike_replicas")
    return {(of["of_pool"], of["reason"]): value for _, of, value in family["samples"] if value}


def whose(generation: Generation, tokens: Any) -> str:
    """The model whose text this is, whole."""
    models = [name for name, model in (("a", A), ("b", B)) if tokens == undisturbed(generation, model)]
    assert models, "the text of neither"
    return models[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "answers"),
    [
        ("ab", "ab", {"a", "b"}),
        ("a", "ab", {"a"}),  # decode-b has nobody to read from
        ("ab", "b", {"b"}),
        ("aab", "ab", {"a", "b"}),
    ],
)
async def test_pairs_are_of_one_model(prefill: str, decode: str, answers: set[str]) -> None:
    async with running_router(cluster_of(prefill, decode), max_retries=0) as rig:
        generations = [generation_of(i, i + 1, seed=i) for i in range(20)]
        texts = await asyncio.gather(*(rig.tokens(generation) for generation in generations))
        assert {whose(generation, text) for generation, text in zip(generations, texts, strict=True)} == answers
        assert rig.count("splitserve_router_decisions", result="remote") == 20


async def test_without_a_like_prefill_replica_decode_computes_the_prompt() -> None:
    """As when one pool is updated before the other: slower, and said, but no outage."""
    async with running_router(cluster_of("aa", "b"), max_retries=0) as rig:
        generation = generation_of(5)
        assert whose(generation, await rig.tokens(generation)) == "b"
        assert rig.count("splitserve_router_decisions", result="fallback_aggregated") == 1
        assert unlike(rig) == {("prefill", "no_partner"): 2, ("decode", "no_partner"): 1}


async def test_another_layout_is_another_partner_but_the_same_model() -> None:
    async with running_router(cluster_of("a", "l"), max_retries=0) as rig:
        assert unlike(rig) == {("prefill", "no_partner"): 1, ("decode", "no_partner"): 1}
        (note, *_) = map(str, rig.router.unlike)
        assert note.endswith("unlike kv")


async def test_what_has_begun_goes_on_at_its_own_model_only() -> None:
    """decode-0 (A) dies with streams open; B has room, and the next of A comes later."""
    async with running_router(cluster_of("ab", "ab"), recovery_s=5.0) as rig:
        rig.cluster.script = lambda _: SLOW
        generations = [generation_of(i, seed=i, max_tokens=30) for i in range(12)]
        running = [rig.start(generation) for generation in generations]
        await until(lambda: all(binding_is_final(generation) for generation in generations))
        begun = [generation.binding.model for generation in generations]
        rig.cluster.kill("decode-0")
        rig.cluster.remove("decode-0")
        await asyncio.sleep(0.2)
        join(rig, "decode", "decode-9", A)
        for generation, model, task in zip(generations, begun, running, strict=True):
            assert (whose(generation, await task) == "a") == ("aaaa" in model)
        assert {"aaaa" in model for model in begun} == {True, False}


async def test_it_ends_with_an_error_when_nobody_has_that_model_any_more() -> None:
    async with running_router(cluster_of("ab", "a"), recovery_s=0.2) as rig:
        rig.cluster.script = lambda _: SLOW
        generation = generation_of(5, max_tokens=30)
        task = rig.start(generation)
        await until(lambda: binding_is_final(generation))
        rig.cluster.kill("decode-0")
        join(rig, "decode", "decode-1", B)
        rig.cluster.remove("decode-0")
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.status == 503
        assert "of the model that began this answer" in caught.value.message


async def test_it_goes_on_where_only_decode_still_has_its_model() -> None:
    """Its prefill replicas are of the next model already: decode computes what was generated so far."""
    async with running_router(cluster_of("a", "aa"), recovery_s=5.0) as rig:
        rig.cluster.script = lambda _: SLOW
        generation = generation_of(5, max_tokens=30)
        task = rig.start(generation)
        await until(lambda: binding_is_final(generation))
        join(rig, "prefill", "prefill-9", B)
        rig.cluster.remove("prefill-0")
        rig.cluster.kill(rig.cluster.of("generate")[0].replica_id)
        assert whose(generation, await task) == "a"
        assert rig.count("splitserve_router_decisions", result="fallback_aggregated") == 1


async def test_what_has_not_begun_may_go_to_the_other_model() -> None:
    async with running_router(cluster_of("ab", "a"), retry_delay_s=0.1) as rig:  # in which the other one comes
        rig.cluster.fail(Fault(Phase.QUEUE, "dead"))
        generation = generation_of(5)
        task = rig.start(generation)
        await until(lambda: bool(rig.cluster.struck))
        join(rig, "decode", "decode-1", B)
        assert whose(generation, await task) == "b"


async def test_the_prompts_of_one_request_are_answered_by_one_model() -> None:
    """The first to answer decides. The others, sent to the other model, are dropped and generated anew."""
    async with running_router(cluster_of("ab", "ab")) as rig:
        late = Script(prefill_s=0.1)
        scripts = {(1,): PLAIN, (2,): late, (3,): late, (4,): late}
        rig.cluster.script = lambda call: scripts[call.spec.prompt_ids]
        binding = ModelBinding()
        generations = [replace(generation_of(i), binding=binding) for i in (1, 2, 3, 4)]
        texts = []
        for number, generation in enumerate(generations):
            if number >= 2:
                binding.lean("")  # as if these had found no room at the first one's model
            texts.append(rig.start(generation))
            await asyncio.sleep(0)
        answers = {whose(generation, await text) for generation, text in zip(generations, texts, strict=True)}
        assert len(answers) == 1
        sent = {call.replica_id for call in rig.cluster.of("generate")}
        assert sent == {"decode-0", "decode-1"}, "none of them was sent to the other model"


@pytest.mark.parametrize(("prefill", "decode"), [("ab", "ab"), ("a", "ab")])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_what_failed_at_one_model_is_tried_at_the_other(prefill: str, decode: str, pool: str) -> None:
    """Nobody has got anything of it yet: that it went to A is no reason to stay where it fails again and again."""
    async with running_router(cluster_of(prefill, decode), max_retries=1) as rig:
        sick = rig.cluster.decode if pool == "decode" else rig.cluster.prefill
        assert sick is not None
        submit = sick.submit
        failed = []

        async def fail_at_a(replica_id: str, call: Any) -> Any:
            if replica_id == f"{pool}-0":
                failed.append(replica_id)
                raise RuntimeError("sick")
            return await submit(replica_id, call)

        sick.submit = fail_at_a  # type: ignore[method-assign]
        generation = generation_of(5)
        assert whose(generation, await rig.tokens(generation)) == "b"
        assert len(failed) == 1


async def test_who_was_slower_at_another_model_has_not_failed() -> None:
    """Its tokens are dropped and generated again: that is no retry of those that the config counts."""
    async with running_router(cluster_of("ab", "ab"), max_retries=0) as rig:
        scripts = {(1,): PLAIN, (2,): Script(prefill_s=0.1)}
        rig.cluster.script = lambda call: scripts[call.spec.prompt_ids]
        binding = ModelBinding()
        generations = [replace(generation_of(i), binding=binding) for i in (1, 2)]
        texts = []
        for generation in generations:
            texts.append(rig.start(generation))
            await asyncio.sleep(0)
            binding.lean("")  # as if the other had found no room at the first one's model
        assert len({whose(generation, await text) for generation, text in zip(generations, texts, strict=True)}) == 1
        assert {call.replica_id for call in rig.cluster.of("generate")} == {"decode-0", "decode-1"}


async def test_a_prompt_waits_for_the_model_that_has_begun_its_request() -> None:
    """It comes late (it needed a pool that was empty), and the only replica of that model is being replaced."""
    async with running_router(cluster_of("ab", "ab"), recovery_s=5.0) as rig:
        binding = ModelBinding()
        first, late = (replace(generation_of(i), binding=binding) for i in (1, 2))
        assert whose(first, await rig.tokens(first)) == "a"
        rig.cluster.remove("decode-0")
        task = rig.start(late)
        await asyncio.sleep(0.2)
        join(rig, "decode", "decode-9", A)
        assert whose(late, await task) == "a"


async def test_a_replica_with_another_tokenizer_gets_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_router(cluster_of("as", "as"), max_retries=0, tokenizer="t") as rig:
            generations = [generation_of(i) for i in range(8)]
            for generation in generations:
                assert whose(generation, await rig.tokens(generation)) == "a"
            assert {call.replica_id for call in rig.cluster.calls if call.method != "pulse"} == {
                "prefill-0",
                "decode-0",
            }
            assert unlike(rig) == {("prefill", "tokenizer"): 1, ("decode", "tokenizer"): 1}
            rig.cluster.remove("prefill-1")
            rig.cluster.remove("decode-1")
            rig.router.pools_changed(rig.cluster.decode.replicas())
            assert not unlike(rig)
    said = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "unlike_replica"]
    assert len(said) == 2
    assert all("another tokenizer than this ingress" in text for text in said)


async def test_nobody_with_its_tokenizer_is_no_replica() -> None:
    async with running_router(cluster_of("s", "s"), max_retries=0, tokenizer="t") as rig:
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation_of(5))
        assert caught.value.status == 503


async def test_a_replica_may_leave_between_its_choice_and_the_look_at_it() -> None:
    """Serve tells of the pools on a thread of its own, at any time."""
    cluster = cluster_of("aa", "aa")
    assert cluster.prefill is not None
    async with running_router(cluster) as rig:
        view = rig.router._view
        look = view.prefill_candidates
        left: list[str] = []

        def look_then_leave() -> list[PrefillCandidate]:
            candidates = look()
            if not left:
                left.append(rig.cluster.remove("prefill-0").replica_id)  # the one that is chosen
            return candidates

        view.prefill_candidates = look_then_leave  # type: ignore[method-assign]
        generation = generation_of(5)
        assert whose(generation, await rig.tokens(generation)) == "a"
        assert [call.replica_id for call in rig.cluster.of("prefill")] == [*left, "prefill-1"]


def binding_is_final(generation: Generation) -> bool:
    return generation.binding.is_final
