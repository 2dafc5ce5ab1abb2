"""A model of the Hub, asked once, fetched once, and given to replicas as a folder; or its copy in the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from cluster.config.model import ModelConfig
from cluster.launch import disk
from cluster.launch.model_facts import BUNDLED_FACTS
from replicas import hub_model
from tests.cluster.fake_hub import SHA, fake_hub
from tests.cluster.test_wrong_starts import LLAMA, ROOT, model

FILES = model(LLAMA) | {
    "generation_config.json": b"{}",
    "pytorch_model.bin": b"the same weights, of another program",
    "original/consolidated.pth": b"and again",
    "README.md": b"text",
    "picture.png": b"...",
}
HUB = {"org/tiny": FILES}

# Plans the start that the arguments say, and gets it ready.
_PROGRAM = """
import json, sys
from cluster.launch import start
from cluster.launch.machine import Machine
from cluster.terminal import steps
from replicas import hub_model
from replicas.hub_model import HubRefusal, refuse_unavailable
hub_model._PATIENCE_S = steps._LINE_PERIOD_S = 60.0  # the machine may stand still
start.check_address = lambda *_: None
planned = start.plan_start(start.Typed("org/tiny", None, None, {}), Machine(2, 24 * 10**9, 20 * 10**9))
if sys.argv[1:] == ["plan"]:
    sys.exit()
ready = start.ready_to_serve(planned)
try:
    refuse_unavailable("org/tiny")
    refusal = ""
except HubRefusal as error:
    refusal = str(error)
print(json.dumps({
    "printed": planned.as_yaml(), "chosen": planned.chosen, "warnings": planned.warnings, "source": ready.model.source,
    "name": ready.model.name, "length": ready.model.max_model_len, "refusal": refusal,
    "heavy": sorted({"ray", "torch"} & set(sys.modules)),
}))
"""


def run(
    environment: dict[str, str], folder: Path, *arguments: str, program: str = _PROGRAM
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_is_fetched_once_and_served_from_its_folder(tmp_path: Path) -> None:
    with fake_hub(HUB) as url:
        done = run({"HF_ENDPOINT": url}, tmp_path)
    found = answer(done)
    assert re.fullmatch(r"splitserve: fetching org/tiny from the Hub \(\d+\.\d s\)\n", done.stderr), "no bar in a pipe"
    folder = Path(found["source"])
    assert folder.name == SHA
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (found["name"], found["length"], found["warnings"], found["refusal"]) == ("tiny", 512, [], "")
    assert "source: org/tiny\n" in found["printed"]
    assert "org/tiny, float32, 512 tokens a request" in found["chosen"]
    assert "weights 2 x 256 MB" in found["chosen"], "what the Hub says, before anything is fetched"
    assert found["heavy"] == []
    # The Hub is away: what was fetched is served, and that is said.
    again = answer(run({"HF_ENDPOINT": "http://127.0.0.1:9"}, tmp_path))
    assert (again["source"], again["name"], again["refusal"]) == (found["source"], "tiny", "")
    (warning,) = again["warnings"]
    assert "the Hub can't be reached; what an earlier start fetched is used" in warning


def test_it_is_told_how_much_has_come(tmp_path: Path) -> None:
    program = """
from replicas import hub_model
hub_model._PATIENCE_S = 60.0  # the machine may stand still
told = []
found = hub_model.find_on_hub("org/tiny")
hub_model.fetch(found, on_bytes=told.append)
print(max(told) == found.num_bytes - found.config.stat().st_size or (told, found))
"""
    with fake_hub(HUB) as url:
        done = run({"HF_ENDPOINT": url}, tmp_path, program=program)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_files_that_come_at_the_same_time_are_all_counted() -> None:
    """The Hub's library lets several threads tell one bar."""
    told: list[int] = []
    bar = hub_model._bar_class(told.append)(unit="B")

    class Piece(int):
        def __int__(self) -> int:
            other = threading.Thread(target=bar.update, args=(5,))  # while this one is being counted
            other.start()
            other.join()
            return 7

    bar.update(Piece(7))
    assert told == [5, 12]


def test_its_library_is_loaded_before_the_hub_is_waited_for(tmp_path: Path) -> None:
    """From a cold disk that takes longer than the Hub is given: it looked like one that can't be reached."""
    program = """
import sys, threading
from replicas import hub_model
hub_model._PATIENCE_S = 60.0

class Loads:
    by = {}
    def find_spec(self, name, path=None, target=None):
        if name.startswith("huggingface_hub"):
            self.by[name] = threading.current_thread().name

sys.meta_path.insert(0, Loads())
hub_model.find_on_hub("org/tiny")
print({"huggingface_hub", "huggingface_hub.hf_api", "huggingface_hub.file_download"} <= set(Loads.by))
print({name for name, thread in Loads.by.items() if thread != "MainThread"})
"""
    with fake_hub(HUB) as url:
        done = run({"HF_ENDPOINT": url}, tmp_path, program=program)
    assert done.stdout == "True\nset()\n", done.stdout + done.stderr


@pytest.mark.slow
def test_a_fetch_that_came_to_no_end_is_no_model(tmp_path: Path) -> None:
    """Its config alone is in the cache."""
    with fake_hub(HUB) as url:
        assert run({"HF_ENDPOINT": url}, tmp_path, "plan").returncode == 0
    done = run({"HF_HUB_OFFLINE": "1"}, tmp_path)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "HF_HUB_OFFLINE is set: unset it" in last
    assert "Of an earlier start there is a copy that can't be served" in last


def test_a_repository_without_weights_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with fake_hub({"org/tiny": {name: FILES[name] for name in ("config.json", "tokenizer.json")}}) as url:
        done = run({"HF_ENDPOINT": url}, tmp_path)
    assert "org/tiny on the Hub has no weights" in done.stderr.splitlines()[-1]


def test_a_replica_asks_a_hub_that_does_not_answer_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(source: str, key: str) -> None:
        asked.append(source)
        if len(asked) < wanted:
            raise hub_model.HubUnreachable("no answer")

    monkeypatch.setattr(hub_model, "find_on_hub", find)
    monkeypatch.setattr(hub_model, "copy_in_cache", lambda _: None)
    monkeypatch.setattr(hub_model, "_PAUSE_S", 0.0)
    wanted = 3
    hub_model.refuse_unavailable("org/tiny")
    assert len(asked) == 3
    asked, wanted = [], 4
    with pytest.raises(hub_model.HubUnreachable, match="no answer"):
        hub_model.refuse_unavailable("org/tiny")
    assert len(asked) == 3


def test_a_disk_that_is_too_full_is_told_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub_model.HubModel("org/large", Path("config.json"), None, ("*.safetensors",), 10**15)
    monkeypatch.setattr(hub_model, "copy_in_cache", lambda _: None)
    with pytest.raises(hub_model.HubRefusal, match=r"org/large takes 1000000.0 GB more .* set HF_HOME to a folder on"):
        hub_model.fetch(found)


def test_a_conversion_needs_room_and_a_folder_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(free=10**8)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    of = ModelConfig(cache_dir=tmp_path / "cache")
    (finding,) = disk.disk_findings(of, BUNDLED_FACTS)
    assert finding.is_error
    assert "takes 538 MB, but there are 100 MB free; choose another folder: --set model.cache_dir" in finding.text
    usage.free = 10**9
    assert [*disk.disk_findings(of, BUNDLED_FACTS)] == []
    (tmp_path / "file").touch()
    (finding,) = disk.disk_findings(ModelConfig(cache_dir=tmp_path / "file" / "cache"), BUNDLED_FACTS)
    assert "can't be written to" in finding.text
    usage.free = 0
    path = of.local_path()
    assert path is not None
    (tmp_path / "cache" / f"{path.stem}-0123").mkdir(parents=True)
    assert [*disk.disk_findings(of, BUNDLED_FACTS)] == [], "an earlier start has converted it"


@pytest.mark.parametrize("source", ["/nowhere/model", "./org/tiny", "model.gguf", "bundled"])
def test_of_a_path_the_hub_is_not_asked(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_model, "find_on_hub", lambda *_: pytest.fail("the Hub was asked"))
    hub_model.refuse_unavailable(source)
    if source != "bundled":
        with pytest.raises(FileNotFoundError, match=f"^model.source: {source} is not there any more"):
            hub_model.refuse_missing_path(source)
    hub_model.refuse_missing_path(__file__)
    hub_model.refuse_missing_path("org/tiny")
