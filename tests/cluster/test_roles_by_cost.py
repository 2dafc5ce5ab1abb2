"""The policy of pools whose replicas may do both: who generates and who computes the prompt, by what it costs."""

from __future__ import annotations

import pytest

from cluster.policies.routing_policy import DecodeCandidate, Need, PrefillCandidate, Route, RouteKind, RoutingRules
from cluster.routing.pairing import choose_route

RULES = RoutingRules(True, 0, False, policy="roles_by_cost", ttft_s=0.4, tpot_s=0.01)
NEED = Need(prompt_tokens=2048, max_tokens=128, num_choices=1, block_size=16)
TOKENS_PER_S = 45_000.0
STEP_S = 0.0045  # with next to nobody in it


class Cards:
    """What a router knows of one prefill and one decode replica, both of which may do both."""

    def __init__(self) -> None:
        self.known = {
            name: {"rows": 0, "queued": 0, "step_s": STEP_S, "share": 0.0, "rate": TOKENS_PER_S} for name in ("d", "p")
        }

    def of(self, name: str, **changes: float) -> Cards:
        self.known[name].update(changes)
        return self

    def route(self, need: Need = NEED) -> Route:
        decodes, prefills = [], []
        for name, known in self.known.items():
            common = {
                "fingerprint": "f",
                "num_rows": int(known["rows"]),
                "row_step_s": known["step_s"],
                "least_row_step_s": STEP_S,
                "prompt_share": known["share"],
                "tokens_per_s": known["rate"],
                "queued_tokens": int(known["queued"]),
            }
            decodes.append(DecodeCandidate(name, 10_000, 10_000, 0, is_away=name == "p", **common))  # type: ignore[arg-type]
            prefills.append(PrefillCandidate(name, 10_000, is_away=name == "d", **common))  # type: ignore[arg-type]
        route = choose_route(need, decodes, prefills, RULES)
        assert isinstance(route, Route)
        return route


def test_where_nothing_presses_each_plays_its_role() -> None:
    route = Cards().route()
    assert (route.decode_id, route.prefill_id, route.kind) == ("d", "p", RouteKind.REMOTE)
    route = Cards().of("d", rows=10, step_s=0.005).of("p", queued=2048, share=0.3).route()
    assert (route.decode_id, route.prefill_id) == ("d", "p")


def test_of_nothing_known_each_plays_its_role() -> None:
    unknown = {"step_s": 0.0, "rate": 0.0}
    route = Cards().of("d", **unknown).of("p", **unknown).route()
    assert (route.decode_id, route.prefill_id) == ("d", "p")


def test_behind_a_long_queue_of_prompts_the_card_that_generates_computes_within_its_objective() -> None:
    cards = Cards().of("p", queued=4 * 2048, share=0.8).of("d", rows=10, step_s=0.005)
    route = cards.route()
    assert (route.decode_id, route.prefill_id, route.kind) == ("d", None, RouteKind.MIXED)
    # Its streams have stood still for prompts as long as they may.
    route = cards.of("d", share=0.5).route()
    assert (route.decode_id, route.prefill_id) == ("d", "p")


def test_streams_that_are_slow_already_wait_for_no_prompt_of_others() -> None:
    route = Cards().of("p", queued=8 * 2048, share=0.8).of("d", rows=60, step_s=0.0095).route()
    assert (route.decode_id, route.prefill_id) == ("d", "p")


def test_where_one_card_is_full_of_streams_the_other_takes_some() -> None:
    cards = Cards().of("d", rows=140, step_s=0.0095)
    assert cards.route().decode_id == "p"
    assert cards.of("p", share=0.3).route().decode_id == "p"


def test_a_card_that_is_busy_with_prompts_takes_no_streams_though_the_other_is_slow() -> None:
    assert Cards().of("d", rows=140, step_s=0.0095).of("p", share=0.8).route().decode_id == "d"


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_small_difference_changes_no_role(share: float) -> None:
    """Streams would come a little sooner from the other card, and the prompt: each second of that is not worth it."""
    route = Cards().of("d", rows=30, step_s=0.006, share=share).of("p", queued=1000).route()
    assert (route.decode_id, route.prefill_id) == ("d", "p")


def test_where_both_cards_have_streams_and_are_late_prompts_stay_with_their_tokens() -> None:
    """To move KV would cost both time, and streams go where fewer prompts are anyway."""
    short = Need(512, 512, 1, 16)
    cards = Cards().of("d", rows=100, step_s=0.0085, share=0.1).of("p", rows=60, step_s=0.007, share=0.4)
    route = cards.route(short)
    assert (route.prefill_id, route.kind) == (None, RouteKind.MIXED)
    # Prompts that would fill a card have one, though it has streams too.
    route = Cards().of("d", rows=100, step_s=0.0085, share=0.1).of("p", rows=30, step_s=0.0055, share=0.75).route(short)
    assert (route.decode_id, route.prefill_id) == ("d", "p")
    # A card with next to no streams is one for prompts.
    route = cards.of("p", rows=10, step_s=0.005, share=0.7).route(short)
    assert (route.decode_id, route.prefill_id) == ("d", "p")
    # Where streams have time for the prompt, it makes nobody late.
    route = cards.of("d", rows=50, step_s=0.006, share=0.0).of("p", rows=40, step_s=0.006, share=0.1).route(short)
    assert (route.decode_id, route.prefill_id) == ("d", "p")


def test_what_is_cached_is_not_computed() -> None:
    need = Need(2048, 128, 1, 16, cached={"d": 2032})
    route = Cards().of("d", rows=10, step_s=0.005).route(need)
    assert (route.decode_id, route.prefill_id) == ("d", None)


def test_a_card_is_no_source_for_itself() -> None:
    """Where it alone is left, it does everything."""
    only = DecodeCandidate("d", 10_000, 10_000, 0, fingerprint="f")
    route = choose_route(NEED, [only], [PrefillCandidate("d", 10_000, 0, is_away=True, fingerprint="f")], RULES)
    assert isinstance(route, Route)
    assert (route.decode_id, route.prefill_id, route.kind) == ("d", None, RouteKind.MIXED)
