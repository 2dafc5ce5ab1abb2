"""Wrong starts: `splitserve serve` answers each in one line that names cause and fix, before Ray is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.config.model import find_bundled_gguf
from tests.cluster.fake_hub import fake_hub

pytestmark = pytest.mark.timeout(900)  # all are started before the first is looked at

ROOT = Path(__file__).parents[2]
DEADLINE_S = 10.0

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "vocab_size": 300,
}  # fmt: skip
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4}
GPU_POOL = "{device: cuda, num_gpus: 1, kv_memory_fraction: 0.9}"
GOOD = "pools:\n  prefill: {kv_capacity_tokens: 4096}\n  decode: {kv_capacity_tokens: 4096}\n"


def safetensors(shape: tuple[int, ...], num_bytes: int) -> bytes:
    """One tensor of float32, of which so many bytes are there."""
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def model(config: object, **files: bytes) -> dict[str, bytes]:
    """Files of a folder. A name's last _ is a dot."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    named = {".".join(name.rsplit("_", 1)): content for name, content in files.items()}
    return {"config.json": text, "tokenizer.json": b"{}", "model.safetensors": safetensors((8, 8), 256)} | named


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name not in names}


def bundled_gguf(num_bytes: int) -> bytes:
    path = find_bundled_gguf()
    assert path is not None
    with path.open("rb") as file:
        return file.read(num_bytes)


INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
FOLDERS: dict[str, dict[str, bytes]] = {
    "good": model(LLAMA),
    "no-config": without(model(LLAMA), "config.json"),
    "no-weights": without(model(LLAMA), "model.safetensors"),
    "no-tokenizer": without(model(LLAMA), "tokenizer.json"),
    "half": model(LLAMA) | {"model.safetensors": safetensors((8, 8), 100)},
    "no-safetensors": model(LLAMA) | {"model.safetensors": b"<html>Not Found</html>" * 10},
    "no-shard": without(model(LLAMA), "model.safetensors")
    | {"model.safetensors.index.json": INDEX, "one.safetensors": safetensors((8, 8), 256)},
    "no-json": model(b"{"),
    "new": model(LLAMA | {"model_type": "llama99"}),
    "own-code": model(LLAMA | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}),
    "mistral": model(MISTRAL),
    "falcon": model(FALCON),
    "quantised": model(LLAMA | {"quantization_config": {"quant_method": "awq"}}),
    "picture": model({"model_type": "vit", "architectures": ["ViTModel"]}),
    "only-gguf": {"a.gguf": b"GGUF"},
}
FILES: dict[str, bytes] = {
    "good.yaml": GOOD.encode(),
    "typo.yaml": GOOD.replace("prefill: {", "prefill: {replica: 2, ").encode(),
    "type.yaml": (GOOD + 'server: {port: "8000"}\n').encode(),
    "empty.yaml": b"",
    "syntax.yaml": b"pools: [\n",
    "list.yaml": b"- pools\n",
    "tab.yaml": b"pools:\n\tdecode: {}\n",
    "binary.yaml": b"\xff\xfe\x00p",
    "split.yaml": b"layout: colocated\n" + GOOD.encode(),
    "one.yaml": b"layout: colocated\npools: {decode: {kv_capacity_tokens: 4096}}\n",
    "keys.yaml": (GOOD + "auth: {api_keys_file: ./keys.txt}\n").encode(),
    "faults.yaml": (GOOD + "testing: {fault_dir: ./faults}\n").encode(),
    "otel.yaml": (GOOD + "tracing: {endpoint: http://127.0.0.1:4318}\n").encode(),
    "labels.yaml": GOOD.replace("decode: {", "decode: {node_labels: {pool: decode}, ").encode(),
    "gpu.yaml": GOOD.replace("{kv_capacity_tokens: 4096}", GPU_POOL).encode(),
    "threads.yaml": GOOD.replace("{", "{num_threads: 0, ", 1).encode(),
    "not.gguf": b"PK\x03\x04" * 100,
    "cut.gguf": bundled_gguf(3_000_000),
    "header.gguf": bundled_gguf(1_000),
    "weights.safetensors": safetensors((8, 8), 256),
    "model-q4": bundled_gguf(2_000),
}  # fmt: skip
HUB_REFUSALS = {
    "org/gated": ("files", 403, "GatedRepo"),
    "org/private": ("all", 401, "RepoNotFound"),
    "org/forbidden": ("all", 403, ""),
    "org/broken": ("all", 500, ""),
}
HUB = {
    **{name: model(LLAMA) for name in HUB_REFUSALS},
    "org/gguf": {"README.md": b"", "model-Q4.gguf": b"GGUF"},
    "org/mistral": model(MISTRAL),
    "org/short": model(LLAMA),
    "org/slow": model(LLAMA),
}


@dataclass(frozen=True)
class Wrong:
    """words: what is typed behind `splitserve serve`; {} is the folder of the files above. says: parts of the line."""

    words: str
    says: tuple[str, ...]
    hub: str = "fake"
    without: str = ""  # a package that is not installed
    port_error: int = 0


WRONG: dict[str, Wrong] = {
    # Config files.
    "a key's typo": Wrong(
        "{}/typo.yaml", ("typo.yaml: pools.prefill.replica: unknown key", 'did you mean "replicas"?')
    ),
    "a number in quotes": Wrong("{}/type.yaml", ('server.port: "8000" is text', "write the number without quotes")),
    "a number out of bounds": Wrong("{}/threads.yaml", ("num_threads: 0 is too small", "from 1 to 1024")),
    "no file": Wrong("{}/nothing.yaml", ("nothing.yaml: no such file",)),
    "a folder for a file": Wrong("{}/folder.yaml", ("folder.yaml: is a folder, expected a YAML file",)),
    "an empty file": Wrong("{}/empty.yaml", ("empty.yaml: is empty", "see configs/local.yaml")),
    "no YAML": Wrong("{}/syntax.yaml", ("syntax.yaml: not valid YAML", "line 2")),
    "a tab": Wrong("{}/tab.yaml", ("tab.yaml: not valid YAML", "indent with spaces, not tabs")),
    "a list": Wrong("{}/list.yaml", ("list.yaml: expected keys at the top level, found a list",)),
    "no text": Wrong("{}/binary.yaml", ("binary.yaml: not UTF-8 text",)),
    "layouts that contradict each other": Wrong(
        "{}/split.yaml", ("layout colocated deploys only the decode pool", "remove pools.prefill, or set layout: split")
    ),
    "no file of API keys": Wrong("{}/keys.yaml", ("auth.api_keys_file", "is no existing file")),
    "no folder of faults": Wrong("{}/faults.yaml", ("testing.fault_dir", "is no existing folder")),
    "no packages for traces": Wrong(
        "{}/otel.yaml",
        ("tracing.endpoint", "needs packages that are not installed", "pip install '.[otel]'"),
        without="opentelemetry",
    ),
    "no NIXL": Wrong(
        "{}/good.yaml",
        ("layout: split", "nixl-cu13, which is not installed", "pip install nixl-cu13"),
        without="nixl_cu13",
    ),
    "no torch": Wrong("{}/good", ("torch, which is not installed", "make setup"), without="torch"),
    "labels of nodes": Wrong("{}/labels.yaml", ("pools.decode.node_labels", "remove it")),
    "no GPU for a config": Wrong("{}/gpu.yaml", ("pools.prefill.device: cuda", "no GPU to use", "set cpu")),
    # What is typed.
    "no such thing": Wrong("{}/nowhere", ("nowhere: no such file or folder", "a folder with a config.json")),
    "a word": Wrong("llama", ("llama: no such file or folder", 'a Hub id "org/name"')),
    "a URL": Wrong("https://huggingface.co/org/name", ("is a URL", 'a Hub id "org/name"')),
    "a file of weights": Wrong("{}/weights.safetensors", ("is a file of weights", "give the folder")),
    "a GGUF without its ending": Wrong("{}/model-q4", ("is a GGUF file by its content", "ends in .gguf")),
    "--set without =": Wrong("--set server.port", ("--set server.port: expected KEY=VALUE",)),
    "--set of no key": Wrong("--set server.prot=1", ("--set server.prot: unknown key", "did you mean server.port?")),
    "--set of a key elsewhere": Wrong("--set max_model_len=1", ("unknown key", "did you mean model.max_model_len?")),
    "--set of no section": Wrong("--set foo.bar=1", ("--set foo.bar: unknown key; there are model,",)),
    "--set of a section with no such key": Wrong(
        '--set server={"prot":1}', ("--set server.prot: unknown key", "did you mean server.port?")
    ),
    "--set of the wrong type": Wrong(
        "--set model.max_model_len=8k", ('model.max_model_len: "8k" is text', "whole number")
    ),
    "--set of the wrong type, with a file": Wrong(
        "{}/good.yaml --set model.max_model_len=8k", ('command line: model.max_model_len: "8k" is text', "whole number")
    ),
    "--set of no choice": Wrong("--set model.dtype=fp16", ('"fp16" is not allowed', 'did you mean "float16"?')),
    "--set of no YAML": Wrong("--set server.host=[", ("--set server.host: '[' is not valid YAML",)),
    "--set twice": Wrong("--set server.port=1 --set server.port=2", ("--set server.port: given twice",)),
    "--port and --set": Wrong("--port 1 --set server.port=2", ("--set server.port: given beside --port",)),
    "--prefill and --set": Wrong("--prefill 2 --set pools.prefill.replicas=2", ("given beside --prefill",)),
    "--prefill 0 with split": Wrong(
        "--prefill 0 --set layout=split", ("--prefill 0: layout split", "give --prefill 1")
    ),
    "--prefill with colocated": Wrong("--prefill 1 --set layout=colocated", ("layout colocated has no prefill pool",)),
    "--decode 0": Wrong("--decode 0", ("--decode 0: somebody must generate", "expected 1 or more")),
    "--prefill 0 with a file": Wrong("{}/good.yaml --prefill 0", ("--prefill 0:", "change layout and pools there")),
    "--prefill with a file without that pool": Wrong(
        "{}/one.yaml --prefill 1", ("--prefill 1: ", "has layout colocated, without a prefill pool")
    ),
    "too many replicas": Wrong("--decode 5000", ("pools.decode.replicas: 5000 is too large", "from 1 to 1024")),
    # Machine and network.
    "no GPU": Wrong("--set pools.decode.device=cuda", ("cuda, but this machine has no GPU", "set cpu")),
    "too much KV": Wrong(
        "--set pools.decode.kv_capacity_tokens=2048000",
        ("pools.decode.kv_capacity_tokens", "94.7 GB", "has 24.0 GB of memory", "give less"),
    ),
    "a taken port": Wrong("--port {taken}", ("server.port: {taken} on 127.0.0.1 is taken", "--port chooses another")),
    "a port out of range": Wrong("--port 70000", ("server.port: 70000 is too large", "from 1 to 65535")),
    "a privileged port": Wrong("--port 80", ("server.port: 80", "ports below 1024 usually need root"), port_error=13),
    "a host of another machine": Wrong("--host 192.0.2.1", ("server.host: 192.0.2.1 is no address of this machine",)),
    "a host that is a URL": Wrong("--host http://localhost", ("server.host", 'without "http://"')),
    # Models on this machine.
    "no config.json": Wrong("{}/no-config", ("model.source", "has no config.json", "expected")),
    "a folder with a GGUF": Wrong("{}/only-gguf", ("has no config.json", "a.gguf: give that file")),
    "no weights": Wrong("{}/no-weights", ("no-weights has no weights", "is it all of the download?")),
    "no tokenizer": Wrong("{}/no-tokenizer", ("no-tokenizer has no tokenizer", "copy the model's tokenizer files")),
    "half of the weights": Wrong("{}/half", ("half/model.safetensors is not whole", "download it again")),
    "no safetensors": Wrong("{}/no-safetensors", ("is no whole safetensors file", "download it again")),
    "a shard is missing": Wrong("{}/no-shard", ("no-shard lacks two.safetensors", "download the rest")),
    "config.json is no JSON": Wrong("{}/no-json", ("config.json is not valid JSON",)),
    "a model of tomorrow": Wrong("{}/new", ("does not know model_type 'llama99'", "a newer one may")),
    "code of its own": Wrong("{}/own-code", ("code that comes with the model", "model.trust_remote_code: true")),
    "sliding windows": Wrong("{}/mistral", ("MistralForCausalLM", "sliding-window attention", "not supported")),
    "Falcon": Wrong("{}/falcon", ("FalconForCausalLM", "does not let its attention be replaced")),
    "quantised weights": Wrong(
        "{}/quantised", ("quantization_config.bits: null is not supported, expected 4", "model.quantise")
    ),
    "no text model": Wrong("{}/picture", ("(vit)", "causal language model")),
    "too long": Wrong(
        "{}/good --set model.max_model_len=4096",
        ("model.max_model_len: 4096 is more than good can do, 512 tokens", "expected at most 512"),
    ),
    "no such GGUF": Wrong("{}/nothing.gguf", ("model.source", "does not exist")),
    "no GGUF": Wrong("{}/not.gguf", ("not.gguf is no GGUF file", "is it the right one")),
    "half a GGUF": Wrong("{}/cut.gguf", ("cut.gguf is not a whole GGUF file", "a download that was cut short")),
    "a GGUF that ends in its header": Wrong("{}/header.gguf", ("not a whole GGUF file", "cut short")),
    # The Hub.
    "unknown to the Hub": Wrong(
        "org/nothing", ("org/nothing: the Hub has no such model", "is it spelt right?", "HF_TOKEN")
    ),
    "gated": Wrong("org/gated", ("org/gated is a gated model", "accept its licence at", "set HF_TOKEN")),
    "private": Wrong("org/private", ("org/private: the Hub has no such model", "for a private one set HF_TOKEN")),
    "forbidden": Wrong("org/forbidden", ("org/forbidden: the Hub does not let it be read (403)", "make a token")),
    "a Hub that is broken": Wrong("org/broken", ("org/broken: the Hub (", "can't be reached: it answers 500")),
    "a Hub that is slow": Wrong("org/slow", ("org/slow: the Hub (", "no answer within", "give a folder")),
    "a GGUF on the Hub": Wrong(
        "org/gguf", ("org/gguf on the Hub has no config.json", "model-Q4.gguf: download that file")
    ),
    "refused before it is fetched": Wrong("org/mistral", ("MistralForCausalLM", "sliding-window attention")),
    "too long for a model of the Hub": Wrong(
        "org/short --set model.max_model_len=600", ("600 is more than short can do",)
    ),
    "offline": Wrong(
        "org/name", ("org/name is not in the Hub's cache", "HF_HUB_OFFLINE is set: unset it"), hub="offline"
    ),
    "no network": Wrong(
        "org/name", ("org/name: the Hub (http://127.0.0.1:9)", "can't be reached", "give a folder"), hub="none"
    ),
}

# Starts each, and says what came of it, how long it took, and which heavy packages were loaded by then. What takes too
# long is tried again: a disk is cold and a machine stands still once, but what is waited for is waited for each time.
_PROGRAM = """
import contextlib, errno, importlib.util, io, json, sys, time, types
from unittest import mock
from cluster.launch import packages
from cluster.launch.machine import Machine
from cluster.config import tracing
from cluster.serving import command_line
from replicas import hub_model
from cluster.launch import start
import cluster.http.server_address as server_address

server = types.ModuleType("cluster.serving.serve_command")
server.run_server = lambda config: print("SERVED")
sys.modules["cluster.serving.serve_command"] = server
command_line.look_at_machine = lambda environment: Machine(2, 24 * 10**9, 20 * 10**9)
start._PORT_PATIENCE_S = 0.2

def find_spec(name, package=None):
    return None if name.startswith(missing) else importlib.util.find_spec(name, package)

def start_once(words, port_error):
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        output = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch.object(packages, "find_spec", find_spec))
        stack.enter_context(mock.patch.object(tracing, "find_spec", find_spec))
        if port_error:
            refused = mock.Mock(side_effect=OSError(port_error, "Permission denied"))
            stack.enter_context(mock.patch.object(server_address.socket, "socket", refused))
        started = time.monotonic()
        code = command_line.main(["serve", *words])
        seconds = time.monotonic() - started
    return seconds, code, output.getvalue(), errors.getvalue()

for line in sys.stdin:
    words, missing, port_error = json.loads(line)
    missing = missing or "nothing"
    hub_model._PATIENCE_S = 1.0 if "org/slow" in words else 60.0
    seconds, *said = start_once(words, port_error)
    for _ in range(2):
        if seconds >= float(sys.argv[1]):
            seconds, *said = min((seconds, *said), start_once(words, port_error), key=lambda took: took[0])
    heavy = sorted({"ray", "torch"} & set(sys.modules))
    print(json.dumps([*said, seconds, heavy]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "folder.yaml").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, files in FOLDERS.items():
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    with fake_hub(HUB, HUB_REFUSALS, slow=("org/slow",)) as url, socket.create_server(("127.0.0.1", 0)) as taken:
        hubs = {
            "fake": {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"},
            "offline": {"HF_HUB_OFFLINE": "1"},
            "none": {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
        }
        found: dict[str, list[Any]] = {"taken": [taken.getsockname()[1]]}
        for hub, environment in hubs.items():
            found |= _run(hub, folder, taken.getsockname()[1], environment | {"HF_HOME": str(folder / hub)})
        yield found


def _run(hub: str, folder: Path, taken: int, environment: dict[str, str]) -> dict[str, list[Any]]:
    cases = {name: wrong for name, wrong in WRONG.items() if wrong.hub == hub}
    lines = [
        json.dumps([w.words.replace("{taken}", str(taken)).replace("{}", str(folder)).split(), w.without, w.port_error])
        for w in cases.values()
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, f"{DEADLINE_S}"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "HF_TOKEN_PATH": str(folder / "no-token"), **environment},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_start_is_answered_in_one_line_before_ray(name: str, answers: dict[str, list[Any]]) -> None:
    code, output, errors, seconds, heavy = answers[name]
    lines = [line for line in errors.splitlines() if not line.startswith(("  ", "warning: "))]
    assert len(lines) == 1, errors
    assert code in (1, 2)
    assert output == ""
    for part in WRONG[name].says:
        assert part.replace("{taken}", str(answers["taken"][0])) in lines[0]
    assert heavy == []
    assert seconds < DEADLINE_S


def test_there_are_many() -> None:
    assert len(WRONG) >= 60
