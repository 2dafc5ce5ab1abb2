"""Where a whole server is tested, and how large: on a card, or, the same at a tenth of the size, on a CPU by hand.

    python -m pytest tests/gpu/test_served_split.py                   on a card
    python -m pytest tests/gpu/test_served_split.py -m exhaustive     on a CPU

Both in float32 with the bundled model: what it says does not depend on the machine, but for near ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.golden_set import Golden, load_goldens
from tests.server.running_server import RunningServer, run_server


@dataclass(frozen=True, slots=True)
class Place:
    """device: as in the config. stride: every so many-th golden. num_requests: of the run with too little memory.
    capacity_tokens: of each pool; the longest golden fits, and num_at_once do not.
    """

    device: str
    max_model_len: int
    capacity_tokens: int
    stride: int
    num_requests: int
    num_at_once: int
    num_rule_prompts: int
    num_kills: dict[str, int]
    num_streams: int  # while some are killed
    num_tokens: int  # of each of them


CARD = Place("cuda", 2048, 4096, 1, 1000, 64, 3, {"prefill": 10, "decode": 5}, 6, 48)
CPU = Place("cpu", 768, 1024, 8, 60, 16, 1, {"prefill": 1, "decode": 1}, 3, 16)
PLACES = [pytest.param(CARD, id="cuda"), pytest.param(CPU, id="cpu", marks=pytest.mark.exhaustive)]


@contextmanager
def serving(
    layout: str, place: Place, folder: Path, num_replicas: int = 1, drafting: str = "none"
) -> Iterator[RunningServer]:
    """A server of this layout on what cards there are, or on the CPU; split: each pool has its share of them, and every
    prompt is handed over.
    drafting: by which method."""
    pools = ["prefill", "decode"] if layout == "split" else ["decode"]
    num_engines = num_replicas * len(pools)
    changes: dict[str, Any] = {"layout": layout, "routing.local_by_cost": False, "ingress.queue_timeout_s": 500.0}
    changes |= {"ingress.max_queued_requests": 2000, "limits.max_allowed_token_ids": 8192}
    changes |= {"model.max_model_len": place.max_model_len, "speculative.method": drafting}
    for pool in pools:
        changes |= {
            f"pools.{pool}.replicas": num_replicas,
            f"pools.{pool}.device": place.device,
            f"pools.{pool}.kv_capacity_tokens": place.capacity_tokens,
            f"pools.{pool}.max_running_sequences": 64,
        }
        if place.device == "cuda":
            share = min(1.0, torch.cuda.device_count() / num_engines)
            changes |= {f"pools.{pool}.num_gpus": share, f"pools.{pool}.lag": 1}
            changes |= {f"pools.{pool}.num_threads": 2}
    # Outputs are taken to be as short as one in twenty: too many are let in, and some have to give way.
    changes |= {
        "pools.decode.admission.output_length": "quantile",
        "pools.decode.admission.quantile": 0.05,
        "pools.decode.host_memory_bytes": 1 << 30,
    }
    config = "local.yaml" if layout == "split" else "colocated.yaml"
    with run_server(config, folder, changes) as server:
        yield server


def chosen(place: Place, values: Sequence[Any]) -> list[Any]:
    """Those of them that are tested there."""
    return list(values[:: place.stride])


def goldens_of(place: Place) -> list[Golden]:
    """Those that fit there."""
    return [golden for golden in load_goldens() if len(golden.prompt_ids) + 64 <= place.max_model_len]
