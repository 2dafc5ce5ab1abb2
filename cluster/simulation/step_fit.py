"""Step times from measured steps, by least squares with coefficients that are not negative."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path

from cluster.simulation.cost_model import CostModel
from cluster.simulation.step_model import FEW_ROWS, StepModel
from cluster.user_error import UserError
from replicas.engine.step_record import StepRecord, record_files

# Longer gaps between two steps are waits for work.
_LONGEST_OVERHEAD_S = 0.02
_FEWEST_STEPS = 10
_COEFFICIENTS = (
    "base_s",
    "row_s",
    "few_row_s",
    "context_token_s",
    "prompt_token_s",
    "prompt_pair_s",
    "earlier_pair_s",
)
_CONTENTIONS = [1 + 0.02 * step for step in range(101)]


@dataclass(frozen=True, slots=True)
class StepFit:
    """error: of the fitted durations, as a share of all time in steps (sum of absolute errors over the sum)."""

    model: StepModel
    num_steps: int
    squares: float
    error: float


def read_records(folder: Path) -> dict[str, list[list[StepRecord]]]:
    """By pool, one list for each engine. Raises UserError."""
    pools: dict[str, list[list[StepRecord]]] = {}
    try:
        for pool, path in record_files(folder):
            records = [StepRecord.of_line(line) for line in path.read_bytes().splitlines()]
            pools.setdefault(pool, []).append(records)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not a file of step records: {error}") from error
    if "decode" not in pools:
        raise UserError(f"{folder}: no step records of a decode engine; see config key testing.step_record_dir")
    return pools


def fit_costs(
    folder: Path, kv_bytes_per_token: int, from_s: float = 0.0, until_s: float = math.inf
) -> tuple[CostModel, list[str]]:
    """A cost model of what was recorded between these times (transfer and control path at their defaults), and lines
    about it.

    A pool's contention is the factor under which its steps are explained best, a step that the other pool's steps
    overlap in part being slowed for that part. Raises UserError.
    """
    pools = {
        pool: [
            [record for record in engine if from_s <= record.start_s and record.end_s <= until_s] for engine in engines
        ]
        for pool, engines in read_records(folder).items()
    }
    for pool, engines in pools.items():
        if sum(map(len, engines)) < _FEWEST_STEPS:
            raise UserError(f"{folder}: too few steps of {pool} to fit, {_FEWEST_STEPS} are needed")
    records = {pool: [record for engine in engines for record in engine] for pool, engines in pools.items()}
    fits = {pool: _fit_pool(records[pool], _overlaps(pool, records)) for pool in records}
    models = {pool: fit.model.model_copy(update={"overhead_s": _overhead_s(pools[pool])}) for pool, fit in fits.items()}
    costs = CostModel(
        source=f"fitted to {', '.join(f'{fit.num_steps} steps of {pool}' for pool, fit in fits.items())} in {folder}",
        kv_bytes_per_token=kv_bytes_per_token,
        decode=models["decode"],
        prefill=models.get("prefill", models["decode"]),
    )
    return costs, [_describe(pool, fit, models[pool]) for pool, fit in fits.items()]


def _fit_pool(records: Sequence[StepRecord], overlaps: Sequence[float]) -> StepFit:
    """overlaps: share of each step's time that passed beside another pool's steps."""
    tried = []
    for contention in _CONTENTIONS if any(overlaps) else [1.0]:
        fit = fit_steps(records, [_slowdown(share, contention) for share in overlaps])
        tried.append((fit.squares, contention, fit))
    _, contention, fit = min(tried, key=lambda found: found[:2])
    return replace(fit, model=fit.model.model_copy(update={"contention": round(contention, 2)}))


def _slowdown(share: float, contention: float) -> float:
    """Of a step that passes a share of its time beside another pool's, where it gets 1 / contention as much done."""
    return 1 / (1 - share * (1 - 1 / contention))


def fit_steps(records: Sequence[StepRecord], slowdowns: Sequence[float]) -> StepFit:
    """Durations are taken to be slowdown * (coefficients . features), with an error that grows as their square root."""
    names = [name for name in _COEFFICIENTS if name == "base_s" or any(_feature(r, name) for r in records)]
    rows, targets = [], []
    for record, slowdown in zip(records, slowdowns, strict=True):
        weight = 1 / math.sqrt(max(record.duration_s, 1e-6))
        rows.append([weight * slowdown * _feature(record, name) for name in names])
        targets.append(weight * record.duration_s)
    coefficients = nonnegative_least_squares(rows, targets)
    fitted = [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows]
    weights = [1 / math.sqrt(max(record.duration_s, 1e-6)) for record in records]
    error_s = sum(abs(f - t) / w for f, t, w in zip(fitted, targets, weights, strict=True))
    return StepFit(
        model=StepModel(**{"base_s": 0.0} | dict(zip(names, coefficients, strict=True))),
        num_steps=len(records),
        squares=sum((f - t) ** 2 for f, t in zip(fitted, targets, strict=True)),
        error=error_s / sum(record.duration_s for record in records),
    )


def nonnegative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """x >= 0 with the least |rows x - targets|. Exact, over all supports: for a handful of unknowns.

    The best x solves the unconstrained problem on those unknowns that are not zero in it (Lawson and Hanson, Solving
    Least Squares Problems, 1974, chapter 23), so the best feasible one of those solutions is it.
    """
    size = len(rows[0])
    scale = [math.sqrt(sum(row[i] ** 2 for row in rows)) or 1.0 for i in range(size)]
    gram = [[sum(r[i] * r[j] for r in rows) / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]
    moment = [sum(r[i] * t for r, t in zip(rows, targets, strict=True)) / scale[i] for i in range(size)]
    best, best_gain = [0.0] * size, 0.0
    for count in range(1, size + 1):
        for support in combinations(range(size), count):
            solution = _solve([[gram[i][j] for j in support] for i in support], [moment[i] for i in support])
            if solution is None or min(solution) < 0:
                continue
            # What it takes away from the sum of squares.
            gain = sum(value * moment[i] for value, i in zip(solution, support, strict=True))
            if gain > best_gain:
                best_gain, best = gain, [0.0] * size
                for value, i in zip(solution, support, strict=True):
                    best[i] = value / scale[i]
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Gauss elimination with pivots; None when the matrix is singular to working precision. Mutates its arguments."""
    size = len(vector)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        vector[column], vector[pivot] = vector[pivot], vector[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
            vector[row] -= factor * vector[column]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (vector[row] - known) / matrix[row][row]
    return solution


def _feature(record: StepRecord, name: str) -> float:
    shape = record.shape
    return float(
        {
            "base_s": 1,
            "row_s": shape.num_rows,
            "few_row_s": min(shape.num_rows, FEW_ROWS),
            "context_token_s": shape.num_context_tokens,
            "prompt_token_s": shape.num_prompt_tokens,
            "prompt_pair_s": shape.num_prompt_pairs - shape.num_earlier_pairs,
            "earlier_pair_s": shape.num_earlier_pairs,
        }[name]
    )


def _overlaps(pool: str, records: dict[str, list[StepRecord]]) -> list[float]:
    """Share of each step's time in which some step of another pool was under way."""
    others = [(r.start_s, r.end_s) for other, theirs in records.items() if other != pool for r in theirs]
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(others):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    ends_s = [end_s for _, end_s in merged]
    before_s = list(accumulate((end_s - start_s for start_s, end_s in merged), initial=0.0))

    def busy_until(time_s: float) -> float:
        """Seconds of theirs up to then."""
        index = bisect_left(ends_s, time_s)
        within_s = max(0.0, time_s - merged[index][0]) if index < len(merged) else 0.0
        return before_s[index] + within_s

    return [(busy_until(r.end_s) - busy_until(r.start_s)) / max(r.duration_s, 1e-9) for r in records[pool]]


def _overhead_s(engines: list[list[StepRecord]]) -> float:
    gaps_s = [after.start_s - before.end_s for engine in engines for before, after in pairwise(engine)]
    return statistics.median([gap_s for gap_s in gaps_s if 0 <= gap_s < _LONGEST_OVERHEAD_S] or [0.0])


def _describe(pool: str, fit: StepFit, model: StepModel) -> str:
    coefficients = model.model_dump(include={*_COEFFICIENTS, "overhead_s"}, exclude_none=True)
    parts = ", ".join(f"{name[:-2]} {1e6 * value:.4g}" for name, value in coefficients.items())
    beside = f"{model.contention:.2f} times as long beside another pool's"
    return f"{pool}: {fit.num_steps} steps, error {100 * fit.error:.1f} % of their time, {beside}; in us: {parts}"
