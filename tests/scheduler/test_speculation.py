"""How many drafts a step has: what pays, who rests, what is probed; and how near that comes to the best choices."""

from __future__ import annotations

import random

import pytest

from scheduler.draft_acceptance import DRAFT_COUNTS, DraftAcceptance, expected_accepted
from scheduler.draft_counts import DraftCounts
from scheduler.speculation import DraftChoice, RowSpeculation, SpeculationPolicy, SpeculationState, StepOutlook
from scheduler.speculator import Speculator
from tests.scheduler.simulated_drafts import (
    CPU,
    H200,
    NOTHING,
    REPETITIVE,
    Kind,
    Run,
    StepS,
    Text,
    best,
    by,
    of_many_rows,
    plain,
    simulate,
    times,
)

EAGLE = Kind(0.7, 0.62)
PADDED, RAGGED = SpeculationPolicy(is_padded=True), SpeculationPolicy()


def row(kind: Kind | None, most: int = 7, position: int = 500) -> RowSpeculation:
    """Whose drafts have held as of this kind; None: it has had none."""
    state = SpeculationState()
    if kind is not None:
        state.first = kind.first
        state.gains = tuple(kind.expected(count, is_padded=False) for count in DRAFT_COUNTS)
    return RowSpeculation(state, position, most)


def outlook(rows: list[RowSpeculation], step_s: StepS = H200, **more: float) -> StepOutlook:
    prior = [expected_accepted(0.5, 0.7, count) for count in DRAFT_COUNTS]
    return StepOutlook(rows, step_s, prior, **more)  # type: ignore[arg-type]


CASES = {
    # policy, rows, step times -> drafts of each
    "nobody": (PADDED, [], H200, ()),
    "repetitive, alone": (PADDED, [row(REPETITIVE)], H200, (7,)),
    "four of them": (PADDED, [row(REPETITIVE)] * 4, H200, (7,) * 4),
    "so many that fewer drafts pay more": (PADDED, [row(REPETITIVE)] * 64, H200, (4,) * 64),
    "a head, alone": (PADDED, [row(EAGLE)], H200, (7,)),
    "a head, 32 rows": (PADDED, [row(EAGLE)] * 32, H200, (2,) * 32),
    "little to find, alone: a draft costs next to nothing": (PADDED, [row(Kind(0.1, 0.5))], H200, (4,)),
    "little to find, 16 rows": (PADDED, [row(Kind(0.1, 0.5))] * 16, H200, (0,) * 16),
    "nothing to find, 64 rows": (PADDED, [row(NOTHING)] * 64, H200, (0,) * 64),
    "new rows are tried": (PADDED, [row(None)] * 4, H200, (4,) * 4),
    "more rows than may have some": (
        SpeculationPolicy(max_rows=3, is_padded=True),
        [row(REPETITIVE)] * 4,
        H200,
        (0,) * 4,
    ),
    "at most four": (SpeculationPolicy(max_drafts=4, is_padded=True), [row(REPETITIVE)], H200, (4,)),
    "a row that ends": (PADDED, [row(REPETITIVE, most=3), row(REPETITIVE)], H200, (3, 7)),
    "a row that ends at once": (PADDED, [row(REPETITIVE, most=1), row(REPETITIVE)], H200, (0, 7)),
    "rows that may not": (PADDED, [row(REPETITIVE, most=0)] * 2, H200, (0, 0)),
    "only those that gain": (RAGGED, [row(REPETITIVE), row(NOTHING), row(REPETITIVE)], CPU, (7, 0, 7)),
    "time that goes with tokens": (RAGGED, [row(EAGLE)] * 4, times((1, 10.0), (64, 640.0)), (0,) * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_what_pays(case: str) -> None:
    policy, rows, step_s, expected = CASES[case]
    assert policy.choose(outlook(rows, step_s)).num_drafts == expected


def test_no_option_brings_more() -> None:
    """Against every number of drafts for every number of rows, the best first."""
    rng = random.Random(3)
    for _ in range(200):
        rows = [row(Kind(rng.random(), rng.random())) for _ in range(rng.randint(1, 12))]
        policy = SpeculationPolicy(is_padded=rng.random() < 0.5, off_below=0.0)
        step_s = rng.choice([H200, CPU])
        choice = policy.choose(outlook(rows, step_s))

        def rate(
            drafts: tuple[int, ...], rows: list[RowSpeculation] = rows, policy: SpeculationPolicy = policy
        ) -> float:
            count = max(drafts)
            num_tokens = len(rows) + sum(drafts)
            gained = [r.state.gains[DRAFT_COUNTS.index(k)] for r, k in zip(rows, drafts, strict=True) if k]
            return (len(rows) + sum(gained)) / step_s(count, num_tokens)  # noqa: B023 (called before the next turn)

        order = sorted(range(len(rows)), key=lambda i: -rows[i].state.first)
        everything = {(0,) * len(rows)}
        for count in DRAFT_COUNTS:
            by_gain = sorted(order, key=lambda i: -rows[i].state.gains[DRAFT_COUNTS.index(count)])
            for number in range(1, len(rows) + 1):
                everything.add(tuple(count if i in by_gain[:number] else 0 for i in range(len(rows))))
        # One that is not better by the margin may be left for none at all, which the last step had.
        assert rate(choice.num_drafts) * (1 + policy.margin) >= max(map(rate, everything))


def test_the_last_number_stays_unless_another_brings_more() -> None:
    def rate(kind: Kind, count: int) -> float:
        return (8 + 8 * kind.expected(count, is_padded=True)) / H200(count, 8 * (1 + count))

    kinds = [Kind(0.6, further / 100) for further in range(100)]
    nearly = next(kind for kind in kinds if rate(kind, 2) < rate(kind, 4) < 1.01 * rate(kind, 2))
    assert PADDED.choose(outlook([row(nearly)] * 8, last=2)).step_drafts == 2
    assert PADDED.choose(outlook([row(nearly)] * 8, last=4)).step_drafts == 4
    clearly = next(kind for kind in kinds if rate(kind, 4) > 1.03 * rate(kind, 2))
    assert PADDED.choose(outlook([row(clearly)] * 8, last=2)).step_drafts == 4


def test_a_step_has_no_more_tokens_than_it_may() -> None:
    rows = [row(REPETITIVE)] * 4
    assert PADDED.choose(outlook(rows, most_tokens=32)).num_drafts == (7,) * 4
    for most in range(4, 32):
        for choice in (
            PADDED.choose(outlook(rows, most_tokens=most)),
            SpeculationPolicy(max_tokens=most).choose(outlook(rows)),
        ):
            assert 4 + sum(choice.num_drafts) <= most
            assert (choice.step_drafts > 0) == (most >= 6)


# -- rest and probes ---------------------------------------------------------------------------------------------------


def test_who_rests() -> None:
    """First drafts hold more rarely than 0.3, and would not pay: cheap ones go on."""
    unlikely = Kind(0.1, 0.5)
    assert PADDED.choose(outlook([row(unlikely)] * 16)).resting == tuple(range(16))
    assert PADDED.choose(outlook([row(unlikely)])).resting == ()  # they pay
    assert PADDED.choose(outlook([row(Kind(0.31, 0.0))] * 64)).resting == ()  # they do not, but there is hope
    assert PADDED.choose(outlook([row(None)] * 64)).resting == ()
    mixed = [row(REPETITIVE)] * 8 + [row(NOTHING)] * 8
    choice = PADDED.choose(outlook(mixed))
    assert choice.resting == tuple(range(8, 16))
    assert choice.num_drafts == (choice.step_drafts,) * 8 + (0,) * 8
    assert RAGGED.choose(outlook(mixed, CPU)).num_drafts[8:] == (0,) * 8


def test_rest_is_as_long_as_a_probe_is_dear() -> None:
    """It is paid by half a percent of steps: one that takes a fifth longer, by forty."""

    def rest(num_rows: int, step_s: StepS) -> int:
        return RAGGED.choose(outlook([row(NOTHING)] * num_rows, step_s)).rest_tokens

    assert [rest(16, H200), rest(64, H200)] == [8, 8]
    assert [rest(1, CPU), rest(4, CPU)] == [40, 29]
    assert rest(1, times((1, 10.0), (64, 640.0))) == 64


def test_who_rests_is_no_reason_for_drafts() -> None:
    resting = RowSpeculation(SpeculationState(rests_until=501, first=0.9, gains=(1.7, 3.0, 5.0)), 500, 7)
    assert PADDED.choose(outlook([resting] * 4, credit_s=1.0)) == DraftChoice((0,) * 4)
    awake = resting._replace(position=501)
    assert PADDED.choose(outlook([awake] * 4)).step_drafts == 7


def test_a_probe_has_its_credit() -> None:
    rows = [row(Kind(0.31, 0.0))] * 16
    cost_s = H200(2, 48) - H200(0, 16)
    assert PADDED.choose(outlook(rows)) == DraftChoice((0,) * 16)
    choice = PADDED.choose(outlook(rows, credit_s=cost_s * 1.01))
    assert choice.num_drafts == (2,) * 16
    assert choice.probe_s == pytest.approx(cost_s)
    # One is tried if there is not enough for all.
    assert sum(PADDED.choose(outlook(rows, credit_s=cost_s * 0.99)).num_drafts) == 2
    assert sum(RAGGED.choose(outlook(rows, CPU, credit_s=0.02)).num_drafts) == 2
    hopeless = row(Kind(0.31, 0.0)).state
    hopeless.tried_at = 493
    assert PADDED.choose(outlook([RowSpeculation(hopeless, 500, 7)] * 64, credit_s=1.0)) == DraftChoice((0,) * 64)
    assert PADDED.choose(outlook([RowSpeculation(hopeless, 501, 7)] * 64, credit_s=1.0)).step_drafts == 2


# -- what is learned ---------------------------------------------------------------------------------------------------


def test_acceptance_is_learned_in_two_parts() -> None:
    rng, acceptance = random.Random(1), DraftAcceptance(memory=400.0)
    accepted = []
    for _ in range(4000):
        count = 0
        while count < 7 and rng.random() < (0.9 if count else 0.5):
            count += 1
        acceptance.learn(7, count)
        accepted.append(count)
    assert acceptance.first() == pytest.approx(0.5, abs=0.06)
    assert acceptance.further() == pytest.approx(0.9, abs=0.03)
    assert acceptance.gains()[2] == pytest.approx(sum(accepted) / len(accepted), rel=0.15)
    for _ in range(1000):
        acceptance.learn(2, 0)
    assert acceptance.first() < 0.05
    assert acceptance.further() == pytest.approx(0.9, abs=0.03), "nothing was learned of it"


def learned(
    policy: SpeculationPolicy, num_drafted: int, num_accepted: int, steps: int = 8
) -> tuple[Speculator, RowSpeculation]:
    speculator, tried = Speculator(policy), row(None)
    speculator.step_took(0, 1, 500, 0.030)
    for _ in range(steps):
        speculator.choose([tried], 500)
        speculator.accepted(tried.state, 7, num_drafted, num_accepted)
    return speculator, tried


def test_that_nothing_is_found_costs_something_only_in_padded_steps() -> None:
    assert learned(RAGGED, 0, 0)[1].state.gains == ()
    assert learned(PADDED, 0, 0)[1].state.first < 0.3


def test_what_grammars_force_and_other_drafts_say_nothing_of_each_other() -> None:
    speculator = Speculator(SpeculationPolicy())
    plain, forced = SpeculationState(), SpeculationState(is_forced=True)
    before = speculator.acceptance.first()
    for _ in range(100):
        speculator.accepted(forced, 7, 7, 7)
    assert speculator.acceptance.first() == before
    for _ in range(1000):
        speculator.accepted(plain, 7, 7, 0)
    assert forced.first > 0.99
    assert speculator.acceptance.first() < 0.05
    speculator.step_took(0, 2, 200, 1.0)
    for tokens in (4, 6, 10):
        speculator.step_took(2, tokens, 200, 1.0)
    new = [RowSpeculation(SpeculationState(is_forced=is_forced), 100, 7) for is_forced in (True, False)]
    assert speculator.choose(new, 200)[0] >= 2, "that others guess wrong is no reason against it"


def test_no_drafts_before_a_step_was_timed() -> None:
    speculator = Speculator(PADDED)
    assert speculator.choose([row(REPETITIVE)], 500) == (0,)
    assert speculator.choose([], 0) == ()
    speculator.step_took(0, 1, 500, 0.0042)
    assert speculator.choose([row(REPETITIVE)], 500) == (2,), "the fewest first: what more of them take is not known"


def test_one_plain_step_now_and_then() -> None:
    """Else nobody would know any more what drafts cost."""
    speculator, steady = Speculator(PADDED), row(REPETITIVE)
    speculator.step_took(0, 1, 500, 0.0042)
    chosen = []
    for _ in range(2000):
        (count,) = speculator.choose([steady], 500)
        chosen.append(count)
        speculator.step_took(count, 1 + count, 500, H200(count, 1 + count))
        if count:
            speculator.accepted(steady.state, count, count, min(count, 5))
    assert 2 <= chosen.count(0) <= 5
    assert chosen.count(7) > 1900


def test_when_a_row_was_tried_last() -> None:
    _, tried = learned(PADDED, 4, 2, steps=3)
    assert tried.state.tried_at == 500


def test_counts() -> None:
    counts = DraftCounts()
    for drafted, accepted in ((4, 2), (2, 0), (7, 7)):
        counts.add(drafted, accepted)
    assert counts.drafted == [3, 3, 2, 2, 1, 1, 1]
    assert counts.accepted == [2, 2, 1, 1, 1, 1, 1]
    for num_drafts in (0, 1, 2, 3, 5, 7, 9):
        counts.add_step(num_drafts, 6)
    assert counts.steps == {0: 1, 2: 2, 4: 1, 7: 3}
    assert counts.num_rests == 6


# -- against whoever knows everything ----------------------------------------------------------------------------------


def stretches(kinds: list[Kind], num_texts: int, seed: int) -> list[Text]:
    """Texts of some 300 tokens, of stretches of some 100 each of one kind."""
    rng, texts = random.Random(seed), []
    for _ in range(num_texts):
        lengths = [1 + int(rng.expovariate(1 / 100)) for _ in range(rng.randint(1, 5))]
        texts.append(Text([rng.choice(kinds) for _ in lengths], [16 + length for length in lengths]))
    return texts


def compared(
    kinds: list[Kind], batch: int, step_s: StepS, policy: SpeculationPolicy, *, ideal: bool = False
) -> list[Run]:
    """With no drafts, or by the best choices; and by ours."""
    speculator, runs = Speculator(policy), []
    others = best(step_s, is_padded=policy.is_padded) if ideal else plain
    for chooser, told in ((others, Speculator(policy)), (by(speculator), speculator)):
        texts = stretches(kinds, 2 * batch + 6, seed=5)
        runs.append(simulate(texts, batch, chooser, step_s, told, is_padded=policy.is_padded))
    return runs


@pytest.mark.parametrize(
    ("step_s", "policy", "batches"), [(H200, PADDED, (1, 4, 16, 64)), (CPU, RAGGED, (1, 4, 16))], ids=["h200", "cpu"]
)
@pytest.mark.parametrize("kind", [NOTHING, Kind(0.1, 0.3, found=0.3)], ids=["wrong", "seldom found"])
def test_nothing_to_find_costs_at_most_a_hundredth(
    kind: Kind, step_s: StepS, policy: SpeculationPolicy, batches: tuple[int, ...]
) -> None:
    for batch in batches:
        none, ours = compared([kind], batch, step_s, policy)
        assert none.num_tokens == ours.num_tokens
        assert ours.seconds <= 1.01 * none.seconds


# How much of the best speed is had, at least: with texts that change their kind it takes some tokens to notice.
@pytest.mark.parametrize(
    ("kinds", "batch", "share"),
    [
        ([REPETITIVE], 1, 0.95),
        ([REPETITIVE], 16, 0.95),
        ([EAGLE], 1, 0.95),
        ([EAGLE], 16, 0.95),
        ([EAGLE], 64, 0.95),
        ([NOTHING, REPETITIVE], 4, 0.85),
        ([NOTHING, REPETITIVE], 16, 0.90),
        ([Kind(0.5, 0.6, found=0.3)], 4, 0.90),
    ],
)
def test_near_the_best(kinds: list[Kind], batch: int, share: float) -> None:
    ideal, ours = compared(kinds, batch, H200, PADDED, ideal=True)
    assert ideal.num_tokens == ours.num_tokens
    assert ideal.seconds / ours.seconds >= share
    assert ours.num_switches <= 0.12 * ours.num_steps, "it flaps"


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_what_makes_drafts_is_no_reason_for_fewer(batch: int) -> None:
    """A draft model's time is in each step with drafts: the first that is timed must not stand for all."""
    slower = times((1, 4.2), (16, 5.2), (32, 6.1), (64, 7.3), (128, 9.9), (256, 16.0), drafting_s=0.0016)
    ideal, ours = compared([EAGLE], batch, slower, PADDED, ideal=True)
    assert ideal.seconds / ours.seconds >= 0.94


@pytest.mark.parametrize(("kind", "batch"), [(REPETITIVE, 1), (EAGLE, 1), (EAGLE, 4)])
def test_near_the_best_where_time_goes_with_tokens(kind: Kind, batch: int) -> None:
    ideal, ours = compared([kind], batch, CPU, RAGGED, ideal=True)
    assert ideal.seconds / ours.seconds >= 0.92


# Of the time without drafts, at most. What is hardly found costs as little as what is never found.
@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        ([NOTHING], 1.01),
        ([Kind(0.1, 0.3, found=0.3)], 1.01),
        ([Kind(0.4, 0.5)], 1.01),
        ([REPETITIVE], 0.75),
        ([NOTHING, NOTHING, NOTHING, REPETITIVE], 1.02),  # gone before it is found in each row
    ],
    ids=["wrong", "seldom found", "about as dear as it is worth", "repetitive", "one stretch in four"],
)
@pytest.mark.parametrize("batch", [128, 256])
def test_many_rows_draft_where_it_pays(kinds: list[Kind], most: float, batch: int) -> None:
    policy = SpeculationPolicy(4, 256, is_padded=True, max_tokens=768)
    none, ours = compared(kinds, batch, of_many_rows(batch), policy)
    assert none.num_tokens == ours.num_tokens
    assert ours.seconds <= most * none.seconds


def test_another_text_than_before_is_noticed_in_a_few_steps() -> None:
    """All rows repeat themselves, then none does."""
    policy = SpeculationPolicy(4, 256, is_padded=True, max_tokens=768)
    speculator, step_s = Speculator(policy), of_many_rows(256)
    for kind, most in ((REPETITIVE, 0.8), (NOTHING, 1.015)):
        runs = []
        for chooser, told in ((plain, Speculator(policy)), (by(speculator), speculator)):
            texts = [Text([kind], [384]) for _ in range(256)]
            runs.append(simulate(texts, 256, chooser, step_s, told, is_padded=True))
        assert runs[1].seconds <= most * runs[0].seconds, kind


def test_a_time_without_drafts_is_an_old_one_the_sooner_the_less_they_bring() -> None:
    """By its estimate drafts pay a little, in truth nothing: a plain step shows it, and soon."""
    rows = [row(Kind(0.5, 0.5))] * 16
    gain = rows[0].state.gains[0]
    step_s = times((16, 10.0), (48, 10.0 * (1 + gain) / 1.06))  # six percent more tokens a second with two drafts each

    def chosen(age: int, **more: float) -> int:
        return PADDED.choose(outlook(rows, step_s, last=2, plain_age=age, most_drafts=2, **more)).step_drafts

    assert [chosen(age) for age in (0, 16, 40, 60)] == [2, 2, 2, 0]
    due = PADDED.choose(outlook(rows, step_s, last=2, plain_age=60, most_drafts=2))
    assert due.paying == 2, "the next step has as many as before"
    dear = times((16, 10.0), (48, 10.2))  # nearly two tokens in the time of one: no plain step in so short a time
    assert PADDED.choose(outlook(rows, dear, last=2, plain_age=200, most_drafts=2)).step_drafts == 2


def test_none_are_made_for_habit() -> None:
    """What the last step had is favoured, but not against none at all."""
    hopeless = [row(Kind(0.001, 0.0))] * 4
    step_s = times((4, 10.0), (12, 10.1))
    assert PADDED.choose(outlook(hopeless, step_s, last=2, most_drafts=2)).step_drafts == 0
