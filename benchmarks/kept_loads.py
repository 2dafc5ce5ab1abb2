"""What was measured of a load, kept in a file, so that it can be looked at again without the system."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from cluster.load.request_record import RequestRecord


def keep_records(path: Path, records: Sequence[RequestRecord]) -> None:
    """Blocks. Raises OSError."""
    rows = [asdict(record) | {"token_times_s": record.token_times_s.tolist()} for record in records]
    path.write_bytes(orjson.dumps(rows))


def kept_records(path: Path) -> list[RequestRecord]:
    """As they were kept. Blocks. Raises OSError, ValueError."""
    rows = orjson.loads(path.read_bytes())
    return [RequestRecord(**row | {"token_times_s": array("d", row["token_times_s"])}) for row in rows]
