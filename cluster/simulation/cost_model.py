"""What everything costs on the simulated machines, as one strict JSON file (`--steps`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from cluster.config.number_types import KV_NUMBER_BYTES, NUMBER_BYTES, ROUNDED_BYTES
from cluster.config.section import Section
from cluster.simulation.step_model import StepModel
from cluster.user_error import ConfigError

# Above zero: nothing that one process tells another is there at the same instant.
Latency = Annotated[float, Field(ge=1e-6, le=60)]


class TransferCosts(Section):
    """The handoff from prefill to decode, and blocks that give way to host memory."""

    notify_s: Latency = Field(default=0.001, description="One notification between two engines, polling included")
    latency_s: Latency = Field(default=0.001, description="A read of no bytes, from its start until it is confirmed")
    bytes_per_s: float = Field(default=50e9, gt=0, description="Bandwidth of a read")
    swap_bytes_per_s: float = Field(default=25e9, gt=0, description="Bandwidth to host memory, within the step")
    digest_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        description="At which either end makes the digests of KV that moves; its device does nothing else meanwhile. "
        "none: that costs nothing",
    )


class ControlCosts(Section):
    """Times on the way between client, ingress and engines; none depends on load."""

    ingress_s: Latency = Field(default=0.001, description="From the client until the route is chosen")
    call_s: Latency = Field(default=0.002, description="A call to a replica, or its answer, one way")
    frame_s: Latency = Field(default=0.0005, description="A frame from decode to the ingress")
    stream_s: Latency = Field(default=0.0005, description="A token from the ingress to the client")


class LaneShareCosts(Section):
    """One way to divide a card between two lanes, as an engine measures it when it starts (log event lane_shares)."""

    processors: int = Field(ge=1, description="Multiprocessors that prompts have")
    prefill_rate: float = Field(
        gt=0, le=1, description="Of prompts, while rows run beside them: part of the whole card's"
    )
    decode_rate: float = Field(gt=0, le=1, description="Of rows, while prompts run beside them, likewise")


class WeightReads(Section):
    """What a step reads of the model that it was measured with: of linear layers all weights, whatever is in it."""

    num_linear: int = Field(ge=1, description="Weights of all linear layers but the output head")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="Their number type")
    bytes_per_s: float = Field(gt=0, description="At which they are read")

    def saved_s(self, kind: str) -> float:
        """Of each step, where they are rounded as model.quantise says."""
        return self.num_linear * (NUMBER_BYTES[self.dtype] - ROUNDED_BYTES[kind]) / self.bytes_per_s


class CostModel(Section):
    """Step times of both pools and of all between them."""

    source: str = Field(min_length=1, description="Where the figures come from: machine, model, date, command")
    kv_bytes_per_token: int = Field(ge=1, description="Bytes of KV cache of one token, all layers")
    kv_dtype: Literal["float32", "bfloat16", "float16", "fp8"] = Field(
        default="bfloat16",
        description="Number type of that KV cache, and of the one in whose steps times were measured",
    )
    decode: StepModel = Field(description="Steps of a decode engine")
    prefill: StepModel = Field(description="Steps of a prefill engine; unused when colocated")
    transfer: TransferCosts = Field(default=TransferCosts(), description="The handoff")
    control: ControlCosts = Field(default=ControlCosts(), description="The control path")
    weights: WeightReads | None = Field(
        default=None, description="For model.quantise: what of a step's base is the reading of weights"
    )
    lanes: list[LaneShareCosts] = Field(
        default=[], description="With layout two_lanes: ways to divide a card; empty: those of an H200, estimated"
    )

    @property
    def is_shared(self) -> bool:
        """Whether the pools share a machine and slow each other down."""
        return max(self.decode.contention, self.prefill.contention) > 1.0

    def with_kv_dtype(self, dtype: str) -> CostModel:
        """The same with KV of another number type: its bytes are others, step times stay as measured."""
        num_bytes = self.kv_bytes_per_token * KV_NUMBER_BYTES[dtype] // KV_NUMBER_BYTES[self.kv_dtype]
        return self.model_copy(update={"kv_bytes_per_token": max(1, num_bytes), "kv_dtype": dtype})

    def with_weights(self, kind: str) -> CostModel:
        """The same with weights of linear layers rounded: what a step reads of them is less, all else stays as
        measured. Raises ConfigError where it does not say what a step reads."""
        if self.weights is None:
            raise ConfigError(
                f"model.quantise: {kind} can't be simulated by step times that do not say what weights take of a step; "
                "add weights (num_linear, dtype, bytes_per_s) to them, or fit them to steps of the quantised model and "
                "leave model.quantise out"
            )
        saved_s = self.weights.saved_s(kind)
        steps = {
            pool: of.model_copy(
                update={"base_s": max(0.0, of.base_s - saved_s), "hidden_s": max(0.0, of.hidden_s - saved_s)}
            )
            for pool, of in (("decode", self.decode), ("prefill", self.prefill))
        }
        return self.model_copy(update=steps)

    def read_s(self, num_tokens: int) -> float:
        """A read of so many tokens' KV."""
        return self.transfer.latency_s + num_tokens * self.kv_bytes_per_token / self.transfer.bytes_per_s

    def digest_s(self, num_tokens: int) -> float:
        """The digests of so many tokens' KV, at one end."""
        rate = self.transfer.digest_bytes_per_s
        return num_tokens * self.kv_bytes_per_token / rate if rate is not None else 0.0

    def swap_s(self, num_tokens: int) -> float:
        """Moving so many tokens' KV to or from host memory."""
        return num_tokens * self.kv_bytes_per_token / self.transfer.swap_bytes_per_s


def load_costs(path: Path) -> CostModel:
    """Raises ConfigError, one line for each thing that is wrong."""
    try:
        return CostModel.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        lines = (
            f"{path}: {'.'.join(map(str, found['loc'])) or 'the file'}: {found['msg']}" for found in error.errors()
        )
        raise ConfigError(*lines) from error
