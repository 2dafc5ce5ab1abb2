"""Writes the dashboards as JSON beside this file, or into the folder given: python helm/dashboards/generate.py [FOLDER]

Needs grafana-foundation-sdk (of the extra `dev`). The JSON is committed: a test holds it against what this writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from overview import overview
from replica import replica

# That of Grafana 11.4; the SDK says 36. Grafana migrates older ones forward, and refuses none of this.
_SCHEMA_VERSION = 41


def main(folder: Path) -> None:
    for builder in (overview, replica):
        board = _plain(json.loads(JSONEncoder(sort_keys=True).encode(builder().build())))
        board |= {"schemaVersion": _SCHEMA_VERSION, "id": None}
        for number, panel in enumerate(board["panels"], start=1):
            panel["id"] = number
        for variable in board["templating"]["list"]:
            del variable["id"]  # the same for all
        (folder / f"{board['uid']}.json").write_text(json.dumps(board, indent=1, sort_keys=True) + "\n")


def _plain(value: Any) -> Any:
    """Without the nulls that the SDK writes for what is not set."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
