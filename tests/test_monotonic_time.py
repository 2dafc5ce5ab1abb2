"""Nothing that waits goes by the clock on the wall, which may be set: leases, deadlines and durations are monotonic."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What people and clients are told is the time of day.
TOLD = {
    "cluster/terminal/terminal.py": 1,
    "cluster/serving/ingress.py": 1,
    "cluster/openai/generation_service.py": 1,
    "cluster/openai/responses/response_object.py": 1,
    "cluster/load/machine.py": 1,
    "cluster/monitoring/otel_spans.py": 1,
}
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}


@pytest.mark.parametrize("folder", ["cluster", "replicas", "scheduler"])
def test_the_clock_on_the_wall_is_for_telling_the_time(folder: str) -> None:
    found: dict[str, int] = {}
    for path in (ROOT / folder).rglob("*.py"):
        asked = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        num = sum(ast.unparse(node) in WALL for node in asked)
        if num:
            found[str(path.relative_to(ROOT))] = num
    assert found == {path: num for path, num in TOLD.items() if path.startswith(f"{folder}/")}
