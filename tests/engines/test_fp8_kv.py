"""KV in 8 bits through whole engines: every way that KV takes gives the text of transformers with KV rounded likewise.

In chunks or not, over NIXL, out to host memory and in again, computed again, beside prompts of another lane, continued
by another engine after a death.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.model_identity import ModelIdentity, UnlikeModels, model_of, refuse_unlike
from replicas.serving.engine_builder import build_engine
from replicas.settings import EngineSettings, FaultSettings, KvSettings
from scheduler.admission import AdmissionPolicy
from scheduler.length_estimator import LengthEstimator
from tests.engines.local_pools import ManySystem
from tests.engines.local_system import Generated, LocalSystem, touch
from tests.engines.rounded_kv import RoundedGoldens
from tests.engines.tiny_model import tiny_settings
from tests.golden.golden_set import Golden

FP8 = KvSettings(block_size=16, dtype="fp8")
LENGTHS = (5, 100, 300)
TINY_BLOCK_BYTES = 2 * 2 * 16 * 2 * 16  # of 2 layers, with 2 heads of 16


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> RoundedGoldens:
    return RoundedGoldens(tmp_path_factory.mktemp("fp8"))


def engine(pool: str, folder: Path, **changes: Any) -> EngineSettings:
    """Its steps compute prompts in chunks."""
    return tiny_settings(pool, folder, **{"kv": FP8, "max_batch_tokens": 48, **changes})


def check(goldens: list[Golden], generated: list[Generated]) -> None:
    for golden, got in zip(goldens, generated, strict=True):
        golden.check(got.token_ids[0])


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_in_chunks_handed_over(goldens: RoundedGoldens, tmp_path: Path, lag: int) -> None:
    """And a handoff that goes wrong is seen and repeated, as of any blocks."""
    changes: dict[str, Any] = {"lag": lag, "testing": FaultSettings(str(tmp_path))}
    system = LocalSystem(engine("decode", goldens.folder, **changes), engine("prefill", goldens.folder, **changes))
    try:
        wanted = [goldens.of(length) for length in LENGTHS]
        check(wanted, system.run([system.generation(golden.prompt_ids, 64) for golden in wanted]))
        transfers = system.decode.transfers.snapshot()
        assert transfers.bytes_read == sum(-(-length // 16) for length in LENGTHS) * TINY_BLOCK_BYTES
        assert system.decode.metadata()["kv_bytes_per_token"] * 16 == TINY_BLOCK_BYTES
        touch(tmp_path, "corrupt.received")
        check(wanted[1:2], system.run([system.generation(wanted[1].prompt_ids, 64)]))
        assert (tmp_path / "did.corrupt.received").exists()
        assert system.decode.transfers.snapshot().results["lost: digest mismatch"] == 1
    finally:
        system.close()


@pytest.mark.parametrize("max_batch_tokens", [40, 512])
def test_prompts_beside_rows_of_one_engine(goldens: RoundedGoldens, max_batch_tokens: int) -> None:
    """A prompt that comes whole and in eight chunks: one golden."""
    system = LocalSystem(engine("decode", goldens.folder, lag=1, max_batch_tokens=max_batch_tokens), None)
    try:
        wanted = [goldens.of(length) for length in LENGTHS]
        check(wanted, system.run([system.generation(golden.prompt_ids, 64) for golden in wanted]))
    finally:
        system.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_in_a_lane_of_their_own(goldens: RoundedGoldens, lag: int) -> None:
    system = LocalSystem(engine("decode", goldens.folder, lag=lag, layout="two_lanes"), None)
    try:
        wanted = [goldens.of(length) for length in LENGTHS]
        check(wanted, system.run([system.generation(golden.prompt_ids, 64) for golden in wanted]))
    finally:
        system.close()


@pytest.mark.parametrize("host_memory_bytes", [1 << 22, 0], ids=["host memory", "computed again"])
def test_who_gives_way_and_comes_back(goldens: RoundedGoldens, host_memory_bytes: int) -> None:
    settings = engine(
        "decode", goldens.folder, lag=1, kv_capacity_tokens=512, host_memory_bytes=host_memory_bytes,
        admission=AdmissionPolicy(quantile=0.05, min_samples=1),
    )  # fmt: skip
    system = LocalSystem(settings, None)
    try:
        estimator = system.decode.engine.scheduler.budget.estimator
        assert isinstance(estimator, LengthEstimator)
        for _ in range(100):  # outputs were very short so far
            estimator.observe(5)
        wanted = [goldens.of(length) for length in LENGTHS]
        check(wanted, system.run([system.generation(golden.prompt_ids, 64) for golden in wanted]))
        preemption = system.decode.engine.scheduler.preemption
        assert (preemption.num_swapped if host_memory_bytes else preemption.num_evicted) > 0
        assert preemption.num_host_blocks == host_memory_bytes // TINY_BLOCK_BYTES
    finally:
        system.close()


def test_an_engine_dies_and_another_goes_on_with_its_texts(goldens: RoundedGoldens) -> None:
    wanted = [goldens.of(length) for length in LENGTHS]
    system = ManySystem([engine("decode", goldens.folder)] * 2, [engine("prefill", goldens.folder)])
    try:
        of_engine = LocalSystem.generation  # it needs only a name and a number
        made = [of_engine(_Named(number), golden.prompt_ids, 64) for number, golden in enumerate(wanted)]  # type: ignore[arg-type]
        check(wanted, system.run(made, kill_after=40))
    finally:
        system.close()


class _Named:
    """Numbers generations, as a LocalSystem does."""

    def __init__(self, number: int) -> None:
        self._num_generations = number


# -- ends that are unlike -------------------------------------------------------------------------------


def test_ends_with_other_numbers_never_pair(goldens: RoundedGoldens) -> None:
    """The router finds no pair, a reader is refused and told why, no stream is continued with the other's numbers."""
    system = LocalSystem(engine("decode", goldens.folder), engine("prefill", goldens.folder, kv=KvSettings(16)))
    try:
        assert system.prefill is not None
        ours, theirs = (built.peer.fingerprint for built in (system.decode, system.prefill))
        assert ours.endswith(" dtype=float32+kv:float8_e4m3fn kv=2x2x16x2x16:float8_e4m3fn")
        assert theirs.endswith(" dtype=float32 kv=2x2x16x2x16:float32")
        with pytest.raises(UnlikeModels, match="another model or layout: unlike dtype, kv"):
            refuse_unlike(theirs, ours)
        assert model_of(ours) != model_of(theirs)
        assert ModelIdentity.parse(ours).differences(ModelIdentity.parse(theirs)) == ("dtype", "kv")
        golden = goldens.of(100)
        check([golden], system.run([system.generation(golden.prompt_ids, 64)]))  # decode computed the prompt itself
        assert system.decode.transfers.snapshot().bytes_read == 0
        assert system.prefill.engine.steps.num_prefilled_tokens == 0
    finally:
        system.close()


# -- a checkpoint's scales ------------------------------------------------------------------------------

SCALES = ((0.013, 0.7), (1.5, 0.0021))


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **scales}, folder / "model.safetensors", {"format": "pt"})


def named(key: str, value: str) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale)
        for layer, pair in enumerate(SCALES)
        for name, scale in zip((key, value), pair, strict=True)
    }


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> RoundedGoldens:
    made = RoundedGoldens(tmp_path_factory.mktemp("fp8 scaled"), SCALES)
    with_scales(made.folder, named("k_proj.k_scale", "v_proj.v_scale"))
    return made


def test_a_checkpoint_with_scales(
    scaled: RoundedGoldens, goldens: RoundedGoldens, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cuts off values, too: as the reference does. Unlike scales are unlike models."""
    with caplog.at_level(logging.INFO):
        system = LocalSystem(engine("decode", scaled.folder), engine("prefill", scaled.folder))
    try:
        assert [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "kv_cut"]
        wanted = [scaled.of(100), scaled.of(300)]
        check(wanted, system.run([system.generation(golden.prompt_ids, 64) for golden in wanted]))
        assert wanted[0].prompt_ids != goldens.of(100).prompt_ids or wanted[0].output_ids != goldens.of(100).output_ids
        fingerprint = system.decode.peer.fingerprint
    finally:
        system.close()
    plain = build_engine(engine("decode", goldens.folder), "plain")
    try:
        plain.start()
        differences = ModelIdentity.parse(fingerprint).differences(ModelIdentity.parse(plain.peer.fingerprint))
        assert differences == ("dtype", "kv"), "the weights are the same"
    finally:
        plain.stop()


def test_scales_that_are_not_asked_for_change_nothing(scaled: RoundedGoldens, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        built = build_engine(replace(engine("decode", scaled.folder), kv=KvSettings(16)), "auto")
    built.start()
    built.stop()
    assert built.peer.fingerprint.endswith(" dtype=float32 kv=2x2x16x2x16:float32")
    (line,) = [record for record in caplog.records if record.__dict__.get("event") == "kv_scales_unused"]
    assert "kv.dtype is auto" in line.getMessage()
