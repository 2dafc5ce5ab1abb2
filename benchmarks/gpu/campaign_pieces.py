"""What a campaign runs on servers: workloads with their limits, and which server is put under which of them."""

from __future__ import annotations

from benchmarks.gpu.campaign_servers import ServedPiece, Workload
from benchmarks.gpu.goodput_search import Limits


def _step_of(most_tokens: int) -> tuple[str, ...]:
    """Of vLLM: most tokens in a step. Its own choice is 8,192 on such a card."""
    return ("--max-num-batched-tokens", str(most_tokens))


def _of_four(num_prefill: int) -> dict[str, int]:
    return {"pools.prefill.replicas": num_prefill, "pools.decode.replicas": 4 - num_prefill}


WORKLOADS = (
    Workload("2048/128", 2048, 128, Limits(400.0, 10.0), 300, 9.0),
    # Fewer: 300 at one a second are five minutes, on either engine.
    Workload("8192/256", 8192, 256, Limits(1000.0, 10.0), 120, 1.3),
    Workload("512/512", 512, 512, Limits(400.0, 10.0), 300, 13.0),
)
_ALL = ("2048/128", "512/512", "8192/256")
_TWO_DECODE = {"pools.decode.replicas": 2}
# Of a server on a bare machine: start, in seconds.
_TWO_LANES_S, _ONE_LANE_S, _SPLIT_S, _VLLM_S = 75.0, 60.0, 75.0, 120.0
_HALVES = {
    f"pools.{pool}.{key}": value
    for pool in ("prefill", "decode")
    for key, value in (("num_gpus", 0.5), ("kv_memory_fraction", 0.35))
}
_STEPS_OF_1280 = {f"pools.{pool}.max_batch_tokens": 1280 for pool in ("prefill", "decode")}
SERVED = (
    ServedPiece(
        "lanes",
        "gpu-one-card.yaml",
        _TWO_LANES_S,
        (("2048/128", 8.0), ("2048/128", 12.0)),
        ("2048/128", "512/512"),
    ),
    # Its limit of first tokens is another, so its objective is.
    ServedPiece(
        "lanes-8192",
        "gpu-one-card.yaml",
        _TWO_LANES_S,
        (),
        ("8192/256",),
        changes={"pools.decode.lanes.ttft_s": 1.0},
    ),
    # Long prompts in one step each, by hand instead of by graphs: no row waits for it in two lanes.
    ServedPiece(
        "lanes-long",
        "gpu-one-card.yaml",
        _TWO_LANES_S,
        (),
        ("8192/256",),
        changes={"pools.decode.max_batch_tokens": 8448, "pools.decode.lanes.ttft_s": 1.0},
    ),
    ServedPiece(
        "colocated",
        "gpu-colocated.yaml",
        _ONE_LANE_S,
        (("2048/128", 4.0), ("2048/128", 8.0), ("2048/128", 12.0)),
        has_records=True,
        masks_as="colocated-masks",
        cache_as="colocated-cache",
    ),
    # Two prompts in one step, as vLLM has them near saturation.
    ServedPiece(
        "colocated-4352",
        "gpu-colocated.yaml",
        _ONE_LANE_S,
        (("2048/128", 12.0),),
        changes={"pools.decode.max_batch_tokens": 4352},
    ),
    ServedPiece("split", "gpu-1p1d.yaml", _SPLIT_S, (("2048/128", 4.0),), changes=_HALVES),
    ServedPiece("split-slow", "gpu-1p1d.yaml", _SPLIT_S, (("2048/128", 4.0),), changes=_HALVES, reads_bytes_per_s=5e8),
    # At 7.1 too: its kept runs had another client's arrivals; seed 0 of 300 requests comes at 0.91 of the rate asked.
    ServedPiece(
        "vllm", None, _VLLM_S, (("2048/128", 8.0), ("2048/128", 7.1)), ("8192/256", "512/512"), masks_as="vllm-masks"
    ),
    # What masks cost, by themselves: what another piece has measured of them is not measured again.
    ServedPiece("vllm-masks", None, _VLLM_S, (), masks_as="vllm-masks"),
    ServedPiece("colocated-masks", "gpu-colocated.yaml", _ONE_LANE_S, (), masks_as="colocated-masks"),
    ServedPiece("lanes-masks", "gpu-one-card.yaml", _TWO_LANES_S, (), masks_as="lanes-masks"),
    # What the prefix cache brings. vLLM's has one here only: elsewhere nothing is shared, and it was measured without.
    ServedPiece("vllm-cache", None, _VLLM_S, (), cache_as="vllm-cache"),
    ServedPiece("colocated-cache", "gpu-colocated.yaml", _ONE_LANE_S, (), cache_as="colocated-cache"),
    ServedPiece("lanes-cache", "gpu-one-card.yaml", _TWO_LANES_S, (), cache_as="lanes-cache"),
    # Two cards: what each layout makes of both. vLLM has a server on each, behind HAProxy.
    ServedPiece("pair-split", "gpu-1p1d.yaml", _SPLIT_S, (("2048/128", 16.0),), _ALL, num_cards=2),
    # How long decode's steps are while prefill is saturated: other cards, the same card's other lane, the same engine.
    *[
        ServedPiece(f"{name}-saturated", config, start_s, (), saturated_as=f"{name}-saturated", num_cards=num_cards)
        for name, config, start_s, num_cards in (
            ("pair-split", "gpu-1p1d.yaml", _SPLIT_S, 2),
            ("lanes", "gpu-one-card.yaml", _TWO_LANES_S, 1),
            ("colocated", "gpu-colocated.yaml", _ONE_LANE_S, 1),
        )
    ],
    ServedPiece("pair-roles", "gpu-by-cost.yaml", _SPLIT_S, (), _ALL, num_cards=2),
    # Smaller steps, so that prompts beside streams hold them up for less.
    ServedPiece("pair-roles-1280", "gpu-by-cost.yaml", _SPLIT_S, (), _ALL, changes=_STEPS_OF_1280, num_cards=2),
    ServedPiece("pair-lanes", "gpu-one-card.yaml", _TWO_LANES_S, (), _ALL, changes=_TWO_DECODE, num_cards=2),
    ServedPiece("pair-colocated", "gpu-colocated.yaml", _ONE_LANE_S, (), _ALL, changes=_TWO_DECODE, num_cards=2),
    ServedPiece("pair-vllm", None, _VLLM_S, (), _ALL, num_cards=2),
    # Its own 1P1D.
    ServedPiece("pair-vllm-split", None, _VLLM_S, (), _ALL, num_cards=2, hands_over=True),
    *[
        ServedPiece(f"four-{num}p{4 - num}d", "gpu-1p1d.yaml", _SPLIT_S, (), ("2048/128",), _of_four(num), num_cards=4)
        for num in (3, 2)
    ],
    *[
        ServedPiece(f"four-{name}", config, start_s, (), ("2048/128",), {"pools.decode.replicas": 4}, num_cards=4)
        for name, config, start_s in (
            ("lanes", "gpu-one-card.yaml", _TWO_LANES_S),
            ("colocated", "gpu-colocated.yaml", _ONE_LANE_S),
        )
    ],
    *[
        ServedPiece(f"pair-vllm-{most}", None, _VLLM_S, (), ("2048/128",), num_cards=2, flags=_step_of(most))
        for most in (4096, 16384)
    ],
)
