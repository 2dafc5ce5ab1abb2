"""What a model is, as facts, with what its weights and its KV cache weigh. Gathered by `checkpoint_facts`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.number_types import KV_NUMBER_BYTES, NUMBER_BYTES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """None: not known before a replica loads it. max_positions: what it was trained for. num_weights: numbers, those of
    a quantised file taken apart. kv_numbers_per_token: keys and values of all layers. step_reach: a kind of rotary
    positions that depends on the whole step, and the longest request that it does not concern.
    """

    max_positions: int | None = None
    num_weights: int | None = None
    kv_numbers_per_token: int | None = None
    step_reach: tuple[str, int] | None = None

    def longest_request(self) -> int | None:
        """What model.max_model_len may be."""
        reaches = [self.max_positions, self.step_reach[1] if self.step_reach else None]
        return min((reach for reach in reaches if reach is not None), default=None)

    def weights_bytes(self, dtype: str) -> int:
        """In the memory of one replica; 0 when it is not known, or the dtype is none: that the config refuses."""
        return (self.num_weights or 0) * NUMBER_BYTES.get(dtype, 0)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Likewise. dtype: of the KV cache."""
        return (self.kv_numbers_per_token or 0) * KV_NUMBER_BYTES.get(dtype, 0)


# The model that comes with SplitServe: known without reading its file. 30 layers of 3 heads of 64; head and embeddings
# are one.
BUNDLED_FACTS = ModelFacts(max_positions=8_192, num_weights=134_515_008, kv_numbers_per_token=30 * 2 * 3 * 64)
