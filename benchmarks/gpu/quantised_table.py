"""What a campaign has found of weights and KV of few bits, beside vLLM's and beside what is to be reached."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.campaign_record import CUT, CampaignRecord

_RATE = "_tok_s"  # more of these is better; of all else, less


@dataclass(frozen=True, slots=True)
class _Target:
    """Of one figure of a piece. beside: vLLM's piece that has the same. limit: to reach; None: it is only shown."""

    piece: str
    beside: str | None
    figure: str
    limit: float | None = None


_TARGETS = (
    _Target("steps-fp8", "vllm-fp8", "step_1_ms", 2.5),
    _Target("steps-fp8", "vllm-fp8", "step_16_ms", 3.2),
    _Target("steps-fp8", "vllm-fp8", "step_64_ms", 5.2),
    _Target("steps-fp8", "vllm-fp8", "step_256_ms"),
    _Target("steps-fp8", "vllm-fp8", "prefill_16x2048_tok_s", 62_000),
    _Target("steps-fp8-kv", "vllm-fp8-kv", "step_64_ms", 4.4),
    _Target("steps-fp8-kv", "vllm-fp8-kv", "step_256_ms", 10.5),
    _Target("steps-int4", "vllm-awq", "step_1_ms", 1.7),
    _Target("steps-int4", "vllm-awq", "step_16_ms", 2.6),
    _Target("steps-int4", "vllm-awq", "step_64_ms"),
    _Target("steps-int4", "vllm-awq", "prefill_16x2048_tok_s"),
    _Target("steps-int8", None, "step_1_ms"),
    _Target("steps-int8", None, "step_16_ms"),
    _Target("steps-int8", None, "step_64_ms"),
    _Target("steps-70b", None, "step_1_ms", 19.0),
    _Target("steps-70b", None, "step_16_ms"),
    _Target("steps-70b", None, "start_s"),
    _Target("steps-70b", None, "weights_gb"),
    _Target("steps-70b", None, "load_peak_gb"),
)


def quantised_rows(record: CampaignRecord) -> list[list[str]]:
    """Of what was measured, pieces that were cut short included."""
    rows = []
    for target in _TARGETS:
        ours, theirs = (_figure(record, piece, target.figure) for piece in (target.piece, target.beside))
        if ours is None and theirs is None:
            continue
        cells = ["-" if value is None else f"{value:,g}" for value in (ours, theirs)]
        ratio = _ratio(target.figure, ours, theirs)
        better = "-" if ratio is None else f"{ratio:.2f}x"
        limit = "-" if target.limit is None else f"{target.limit:,g}"
        rows.append([f"{target.piece} {target.figure}", *cells, better, limit, _verdict(target, ours, ratio)])
    return rows


def _figure(record: CampaignRecord, piece: str | None, name: str) -> float | None:
    if piece is None:
        return None
    for line in (record.of(piece), record.of(piece, CUT)):
        if line is not None and line.get(name) is not None:
            return float(line[name])
    return None


def _ratio(name: str, ours: float | None, theirs: float | None) -> float | None:
    """Above 1 where ours is better."""
    if not ours or not theirs:
        return None
    return ours / theirs if name.endswith(_RATE) else theirs / ours


def _verdict(target: _Target, ours: float | None, ratio: float | None) -> str:
    found = []
    if target.limit is not None and ours:
        share = target.limit / ours if target.figure.endswith(_RATE) else ours / target.limit
        found.append("reached" if share <= 1 else f"missed by {100 * (share - 1):.1f} %")
    if ratio is not None and ratio < 1:
        found.append("vLLM is faster")
    return ", ".join(found)
