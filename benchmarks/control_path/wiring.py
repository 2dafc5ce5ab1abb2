"""The only wiring: the real ingress and the real router over stub replicas, and the floor beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.control_path.floor import FloorIngress
from benchmarks.control_path.stub_replicas import StubDecodeReplica, StubPrefillReplica
from cluster.config.file import load_config
from cluster.config.root import Config
from cluster.serving.ingress import Ingress, model_source
from replicas.model.identity_digests import tokenizer_digest
from replicas.model_identity import ModelIdentity

_CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
_REQUEST_ROUTER = "cluster.routing.registry_feed:RegistryFeed"
_MAX_ONGOING = 100_000
_CPUS = 0.1  # logical: there are more processes than cores


def stub_config() -> Config:
    """configs/local.yaml; its pools' sizes mean nothing here."""
    return load_config(_CONFIG)


def build_stub_app(config: Config, step_s: float, num_decode: int) -> Any:
    """To be given to serve.run. Imports Ray."""
    fingerprint = _fingerprint(config)
    decode = _bind("decode", StubDecodeReplica, num_decode, fingerprint, step_s)
    return _ingress(Ingress).bind(config, decode, _bind("prefill", StubPrefillReplica, 1, fingerprint))


def build_floor_app(step_s: float) -> Any:
    """Likewise."""
    return _ingress(FloorIngress).bind(_bind("prefill", StubPrefillReplica, 1, "stub"), step_s)


def _fingerprint(config: Config) -> str:
    """Of no model, but of the ingress's own tokenizer: else it would send no requests."""
    from replicas.gguf.conversion import resolve_source

    folder = resolve_source(model_source(config), str(config.model.cache_dir))
    return str(ModelIdentity("stub", "stub", tokenizer_digest(folder), "stub"))


def _bind(name: str, replica_class: type, num_replicas: int, *arguments: Any) -> Any:
    from ray.serve.config import RequestRouterConfig

    router = RequestRouterConfig(request_router_class=_REQUEST_ROUTER)  # type: ignore[arg-type]
    options = {"num_replicas": num_replicas, "request_router_config": router}
    return _deployment(name, replica_class, **options).bind(*arguments)


def _ingress(ingress_class: type) -> Any:
    from ray import serve

    return _deployment("ingress", serve.ingress()(ingress_class))


def _deployment(name: str, replica_class: type, **options: Any) -> Any:
    from ray import serve

    return serve.deployment(
        name=name, ray_actor_options={"num_cpus": _CPUS}, max_ongoing_requests=_MAX_ONGOING, **options
    )(replica_class)
