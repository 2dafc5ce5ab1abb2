"""Layout of a slot's row on the GPU: int64 columns, the block table behind them. Kernels and runner share it.

One matrix, so that whatever a plan changes goes up in one copy and one scatter.
"""

from __future__ import annotations

import struct

from replicas.sampling.draw import GREEDY_BELOW
from scheduler.sampling_params import SamplingParams

LAST_TOKEN = 0
SEED = 1  # all 64 bits
TOP_K = 2  # 0: all
TEMPERATURE = 3  # the bits of a float32; 0.0: greedy
DROP_MASS = 4  # the bits of a float32: probability that top-p may drop, -1 without top-p
# Where there are drafts; else neither is looked at.
LENGTH = 5  # position of the last token, which drafts in flight may move; -1: rows are where plans say
HISTORY = 6  # tokens that are kept of what the sequence may be drafted by, those of its prompt included; 0: none are
BLOCK_TABLE = 7  # and on


def sampling_columns(params: SamplingParams) -> dict[int, int]:
    """What a slot's row holds of the parameters, by column."""
    drop_mass = -1.0 if params.top_p >= 1.0 else 1.0 - params.top_p
    # Decided here, as the host decides it: some numbers below the bound would reach it as float32.
    temperature = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
    return {
        SEED: (params.seed + 2**63) % 2**64 - 2**63,
        TOP_K: max(0, params.top_k),
        TEMPERATURE: _float_bits(temperature),
        DROP_MASS: _float_bits(drop_mass),
    }


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
