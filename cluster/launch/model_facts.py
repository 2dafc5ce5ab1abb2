"""What a model is, as facts, with what its weights and its KV cache weigh. Gathered by `checkpoint_facts`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.config.number_types import KV_NUMBER_BYTES, NUMBER_BYTES, ROUNDED_BYTES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """None: not known before a replica loads it. max_positions: what it was trained for. num_weights: numbers, those of
    a quantised GGUF taken apart. num_linear: those of them in linear layers, which can be quantised. num_quantised: of
    those that are, quantised_bytes what these weigh, scheme how, in a word. kv_numbers_per_token: keys and values of
    all layers. step_reach: a kind of rotary positions that depends on the whole step, and the longest request that it
    does not concern.
    """

    max_positions: int | None = None
    num_weights: int | None = None
    kv_numbers_per_token: int | None = None
    step_reach: tuple[str, int] | None = None
    num_linear: int | None = None
    num_quantised: int = 0
    quantised_bytes: int = 0
    scheme: str = ""

    def longest_request(self) -> int | None:
        """What model.max_model_len may be."""
        reaches = [self.max_positions, self.step_reach[1] if self.step_reach else None]
        return min((reach for reach in reaches if reach is not None), default=None)

    def weights_bytes(self, dtype: str) -> int:
        """In the memory of one replica; 0 when it is not known, or the dtype is none: that the config refuses."""
        number_bytes = NUMBER_BYTES.get(dtype, 0)
        if not number_bytes or self.num_weights is None:
            return 0
        return (self.num_weights - self.num_quantised) * number_bytes + self.quantised_bytes

    def converted_bytes(self) -> int:
        """Of a GGUF made a folder of float32, whatever becomes of it when it is loaded; 0 when it is not known."""
        return (self.num_weights or 0) * NUMBER_BYTES["float32"]

    def quantised(self, kind: str) -> ModelFacts:
        """The same with the weights of its linear layers rounded at load, as model.quantise says."""
        if kind == "none" or self.num_linear is None:
            return self
        num_bytes = int(self.num_linear * ROUNDED_BYTES[kind])
        return replace(self, num_quantised=self.num_linear, quantised_bytes=num_bytes, scheme=kind)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Likewise. dtype: of the KV cache."""
        return (self.kv_numbers_per_token or 0) * KV_NUMBER_BYTES.get(dtype, 0)


# The model that comes with SplitServe: known without reading its file. 30 layers of 3 heads of 64; head and embeddings
# are one.
BUNDLED_FACTS = ModelFacts(
    max_positions=8_192, num_weights=134_515_008, kv_numbers_per_token=30 * 2 * 3 * 64, num_linear=106_203_456
)
