"""The Serve config of the chart on a real Ray of two nodes, given to it as the KubeRay operator does: it is changed,
and then a node goes. No request is lost in any of it.

The head has no CPUs, as in the chart; Ray's token authentication is on; the worker carries the label of its group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.lifecycle import node_drain
from tests.helm.chart import ALL_VALUES, merged, render
from tests.server.local_ray import LocalRay, free_port, start_local_ray

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

LABELS = {"splitserve.io/pool": "paired"}
DEPLOYMENTS = ("ingress", "prefill", "decode")
QUESTION = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
STORY = QUESTION | {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 200, "min_tokens": 200}


@dataclass(frozen=True, slots=True)
class Served:
    """The chart on a Ray of one worker. expected: the answer to QUESTION, and to STORY."""

    ray: LocalRay
    url: str
    values: dict[str, Any]
    expected: tuple[str, str]

    def upgrade(self, config: dict[str, Any]) -> None:
        """`helm upgrade` with this change of the config; the RayService's serveConfigV2 reaches Ray."""
        self.ray.deploy(render(merged(self.values, {"config": config})).serve_config)

    def replicas(self) -> dict[str, set[str]]:
        return {name: set(self.ray.replicas(name)) for name in DEPLOYMENTS}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    port = free_port()
    labelled = {"node_labels": LABELS}
    # Two prefill replicas, and a new one before an old one stops: no pool is ever empty.
    pools = {"prefill": labelled | {"replicas": 2}, "decode": labelled}
    changes = {
        "server": {"port": port},
        "ingress": labelled,
        "pools": pools,
        "lifecycle": {"update_surge_percent": 100, "drain_timeout_s": 60.0},
    }
    values = merged(ALL_VALUES["cpu-try-out"], {"config": changes})
    rendered = render(values)
    assert rendered.groups["paired"]["labels"] == LABELS
    with ExitStack() as stack:
        ray = start_local_ray(stack, LABELS)
        ray.start_worker("first")
        ray.deploy(rendered.serve_config)
        ray.wait_for(lambda: ray.is_running, 300)
        url = f"http://127.0.0.1:{port}"
        expected = answer_to(url, QUESTION), answer_to(url, STORY)
        assert "Paris" in expected[0]
        yield Served(ray, url, values, expected)


def test_runs_what_the_chart_deploys(served: Served) -> None:
    assert httpx.get(f"{served.url}/health/ready", timeout=120).status_code == 200
    assert "splitserve_build_info" in httpx.get(f"{served.url}/metrics", timeout=120).text
    assert len({node for name in DEPLOYMENTS for node in served.ray.replicas(name).values()}) == 1


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"pools": {"prefill": {"replicas": 1}}}, set()),
        ({"pools": {"decode": {"max_batch_tokens": 256}}}, {"decode"}),
        ({"pools": {"decode": {"max_batch_tokens": 256}}, "limits": {"max_choices": 4}}, {"ingress"}),
    ],
    ids=["number of replicas", "one pool", "ingress"],
)
def test_a_change_replaces_only_what_it_concerns_and_loses_nothing(
    served: Served, change: dict[str, Any], replaced: set[str]
) -> None:
    """One after another, each on top of the last: whatever is not named in one has to be as it was."""
    before = served.replicas()
    change = merged({"pools": {"prefill": {"replicas": 1}}}, change)
    with asking(served):
        served.upgrade(change)

        def is_done() -> bool:
            now = served.replicas()
            gone = {name for name in DEPLOYMENTS if not now[name] & before[name]}
            return served.ray.is_running and gone >= replaced and len(now["prefill"]) == 1

        served.ray.wait_for(is_done, 240)
    after = served.replicas()
    assert {name for name in DEPLOYMENTS if not after[name] <= before[name]} == replaced
    if "limits" in change:
        assert httpx.post(f"{served.url}/v1/chat/completions", json=QUESTION | {"n": 5}).status_code == 400


def test_a_node_goes_and_nothing_is_lost(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test."""
    ray = served.ray
    (first,) = {node for name in DEPLOYMENTS for node in ray.replicas(name).values()}
    ray.start_worker("second")
    for name, value in ray.environment.items():
        monkeypatch.setenv(name, value)
    with asking(served) as answers:
        # As the preStop hook does: time for others to start, and for the drain.
        assert node_drain.ask_to_drain(180 + 60, first) is None

        def has_moved() -> bool:
            return all(set(ray.replicas(name).values()) not in (set(), {first}) for name in DEPLOYMENTS)

        ray.wait_for(has_moved, 240)
    assert len(answers) >= 3


@contextmanager
def asking(served: Served) -> Iterator[list[str]]:
    """Asks one question after the other meanwhile, and for one long story: all must be answered, and right."""
    answers: list[str] = []
    stories: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(answer_to(served.url, QUESTION))

    threads = [
        threading.Thread(target=ask),
        threading.Thread(target=lambda: stories.append(answer_to(served.url, STORY))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(180)
    assert (set(answers), stories) == ({served.expected[0]}, [served.expected[1]])


def answer_to(url: str, body: dict[str, Any]) -> str:
    """The text, or what went wrong."""
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180)
    except httpx.HTTPError as error:
        return repr(error)
    text = answer.text if answer.status_code != 200 else answer.json()["choices"][0]["message"]["content"]
    return str(text)
