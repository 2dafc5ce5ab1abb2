"""Outcomes as a table in Markdown, which docs/reliability.md can take as it is."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.row_run import Outcome

_COLUMNS = (
    "fault",
    "streams",
    "open",
    "failed",
    "wrong",
    "near ties",
    "hung",
    "leaked",
    "recovery s",
    "pause s",
    "first token s",
    "what clients saw",
)


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *map(_cells, outcomes)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    seen = "; ".join(f"{num} x {error}" for error, num in sorted(outcome.seen.items()))
    return (
        outcome.row.name,
        str(outcome.num_streams),
        str(outcome.num_open),
        str(outcome.num_failed),
        str(len(outcome.wrong)),
        str(outcome.verdicts["near tie"]),
        str(outcome.num_hung),
        str(round(sum(outcome.held.values()))),
        f"{outcome.recovery_s:.1f}" if outcome.row.fault is not None else "-",
        f"{outcome.pause_s:.1f}",
        f"{outcome.first_token_s:.1f}",
        seen or "nothing",
    )
