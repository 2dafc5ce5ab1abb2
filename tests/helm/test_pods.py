"""What the pods of the chart are like: where replicas run, how they end, what they may do."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.http.serve_proxy import proxy_environment
from tests.helm.chart import ALL_VALUES, merged, read_values, render
from tests.helm.chart import CHART as CHART_FOLDER

MULTI_HOST = ALL_VALUES["multi-host-rdma"]


def _env(template: dict[str, Any]) -> dict[str, Any]:
    entries = template["spec"]["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names))
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_replicas_find_pods_of_their_group(name: str) -> None:
    """Each pool's label selector is that of exactly one group, which has the GPUs of one replica at least."""
    rendered = render(ALL_VALUES[name])
    pools = {pool: config for pool, config in rendered.config["pools"].items() if pool in ("prefill", "decode")}
    for pool, config in pools.items():
        wanted = config.get("node_labels", {}).items()
        homes = [group for group in rendered.groups.values() if wanted <= group["labels"].items()]
        assert len(homes) == 1, f"{pool} fits {[group['groupName'] for group in homes]}"
        limits = homes[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus = sum(int(count) for resource, count in limits.items() if resource.endswith("/gpu"))
        assert gpus >= config["num_gpus"]


@pytest.mark.parametrize("name", ALL_VALUES)
def test_workers_never_restart_and_have_no_token(name: str) -> None:
    for group, template in render(ALL_VALUES[name]).pods():
        spec = template["spec"]
        assert spec["restartPolicy"] == "Never"
        assert spec.get("automountServiceAccountToken", True) is (group == "head")
        container = spec["containers"][0]["securityContext"]
        assert container["allowPrivilegeEscalation"] is False
        assert container["capabilities"]["drop"] == ["ALL"]


def test_nothing_runs_as_root_unless_asked() -> None:
    for _, template in render().pods():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    rendered = dict(render(ALL_VALUES["full"]).pods())
    assert rendered["prefill"]["spec"]["securityContext"]["runAsUser"] == 0
    assert rendered["ingress"]["spec"]["securityContext"]["runAsUser"] == 2000


@pytest.mark.parametrize(("config", "drain_s"), [({}, 120), ({"lifecycle": {"drain_timeout_s": 299.5}}, 300)])
def test_a_pod_is_given_longer_than_its_drain(config: dict[str, Any], drain_s: int) -> None:
    values = {"config": config, "lifecycle": {"preStopDelaySeconds": 7, "replacementSeconds": 60, "marginSeconds": 5}}
    rendered = render(values)
    spec = rendered.groups["paired"]["template"]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[-3:] == ["--delay-s=7", "--replacement-s=60", f"--timeout-s={drain_s}"]
    assert spec["terminationGracePeriodSeconds"] == 7 + 60 + drain_s + 5
    # The old cluster of an upgrade is not deleted under its requests.
    assert rendered.service["spec"]["rayClusterDeletionDelaySeconds"] == 7 + drain_s + 5


def test_secrets_are_named_and_never_written() -> None:
    for _, template in render(ALL_VALUES["full"]).pods():
        env = _env(template)
        assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
        assert env["KEYS"] == {"secretKeyRef": {"name": "keys", "key": "all"}}
    for _, template in render().pods():
        assert "HF_TOKEN" not in _env(template)


def test_the_config_says_who_takes_connections() -> None:
    wanted = proxy_environment("haproxy")
    rendered = render({"config": {"server": {"proxy": "haproxy"}}})
    for _, template in rendered.pods():
        assert wanted.items() <= _env(template).items()
    # HAProxy is on every node, the head's too.
    assert "excludeHeadPodFromServeSvc" not in rendered.service["spec"]
    for _, template in render().pods():
        assert not wanted.keys() & set(_env(template))
    assert render().service["spec"]["excludeHeadPodFromServeSvc"] is True


def test_serve_looks_after_its_proxies_every_two_seconds() -> None:
    """As with `splitserve serve`."""
    for _, template in render().pods():
        assert _env(template)["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "2"


def test_rdma_brings_devices_and_locked_memory() -> None:
    container = render(MULTI_HOST).groups["decode"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["rdma/hca"] == container["resources"]["requests"]["rdma/hca"] == "4"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_host_namespaces_are_opt_in() -> None:
    for _, template in render().pods():
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(template["spec"])
    spec = render(ALL_VALUES["full"]).groups["decode"]["template"]["spec"]
    assert spec["hostPID"] is spec["hostIPC"] is spec["hostNetwork"] is True


SEPARATE = {"config": MULTI_HOST["config"], "placement": "separate", "workers": MULTI_HOST["workers"]}
HOST = {"rdma": {"enabled": False}, "hostPID": True, "hostIPC": True}
NO_RDMA = {"rdma": {"enabled": False}}


@pytest.mark.parametrize(
    ("values", "transport", "warns"),
    [
        ({}, "CUDA IPC.", False),
        (ALL_VALUES["minimal"], "none.", False),
        (ALL_VALUES["cpu-try-out"], "shared memory.", False),
        (ALL_VALUES["4p4d"], "CUDA IPC.", False),
        (MULTI_HOST, "RDMA.", False),
        ({"workers": {"paired": {"maxReplicas": 2}}}, "TCP.", True),
        (merged(SEPARATE, {"workers": {"decode": NO_RDMA}}), "TCP.", True),
        (merged(SEPARATE, {"workers": {"prefill": HOST, "decode": HOST}}), "CUDA IPC on one host, TCP between", True),
        (ALL_VALUES["scale-to-zero"], "CUDA IPC on one host, TCP between", True),
    ],
)
def test_notes_say_how_kv_moves(values: dict[str, Any], transport: str, warns: bool) -> None:
    notes = render(values).notes
    line = next(line for line in notes.splitlines() if line.startswith("KV transport"))
    assert line.split(None, 2)[2].startswith(transport)
    assert ("WARNING" in line) is warns


def test_notes_warn_of_a_scrape_without_a_key() -> None:
    values = {"metrics": {"serviceMonitor": {"enabled": True}}, "config": {"auth": {"public_paths": ["/health"]}}}
    assert "config.auth.public_paths has no /metrics" in render(values).notes
    assert "public_paths" not in render(ALL_VALUES["4p4d"]).notes


def test_only_groups_in_use_are_rendered() -> None:
    assert set(render().groups) == {"paired"}
    assert set(render(MULTI_HOST).groups) == {"prefill", "decode", "ingress"}
    # A folder mounted by the user is in every worker, and the cache is the claim.
    spec = render(ALL_VALUES["full"]).groups["decode"]["template"]["spec"]
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v
    }
    assert claims == {"models": "llm-server-models", "weights": "weights"}


def test_an_existing_claim_is_used_and_none_is_made() -> None:
    rendered = render({"modelCache": {"enabled": True, "existingClaim": "mine"}})
    assert not rendered.of_kind("PersistentVolumeClaim")
    volumes = rendered.groups["paired"]["template"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "mine"}} in volumes


def test_every_group_has_the_same_keys() -> None:
    groups = read_values(CHART_FOLDER / "values.yaml")["workers"]
    assert groups["prefill"].keys() == groups["decode"].keys() == groups["paired"].keys()
    assert groups["ingress"].keys() == groups["paired"].keys() | {"enabled"}
