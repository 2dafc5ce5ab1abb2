"""What a replica imports and loads leaves the logging of its process alone: Ray Serve's, above all."""

from __future__ import annotations

import json
import logging
import logging.config
import logging.handlers
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.kept_logging import kept_logging
from tests.model_folder import model_folder

# As Serve sets a replica up (`configure_component_logger`), and what else a process may have.
_PREPARED = """
import json, logging, logging.handlers, sys

def state():
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        "loggers": {
            name: [it.level, it.disabled, it.propagate, [id(of) for of in it.handlers], [id(of) for of in it.filters]]
            for name, it in loggers.items() if isinstance(it, logging.Logger)
        },
        "to_close": [id(of()) for of in logging._handlerList],
        "by_name": {name: id(handler) for name, handler in logging._handlers.items()},
        "disable": logging.root.manager.disable,
        "classes": [str(logging.getLoggerClass()), str(logging.getLogRecordFactory()), logging.raiseExceptions],
        "target": id(memory.target),
        "open": [file.stream is not None, other.stream is not None],
    }

file = logging.handlers.RotatingFileHandler(sys.argv[1])
memory = logging.handlers.MemoryHandler(1, target=file, flushLevel=logging.ERROR)
memory.set_name("memory")
serve = logging.getLogger("ray.serve")
serve.handlers, serve.propagate = [memory], False
serve.setLevel(logging.WARNING)
serve.addFilter(lambda record: True)
other = logging.FileHandler(sys.argv[1] + ".other", mode="w")
logging.root.addHandler(other)
logging.getLogger("silent").disabled = True
from replicas.structured_log import configure_logging
configure_logging("INFO", "json")
before = state()
"""
_COMPARED = """
after = state()
kept = {name: after["loggers"][name] for name in before["loggers"]}
assert kept == before["loggers"], (kept, before["loggers"])
new = [handler for handler in after["to_close"] if handler not in before["to_close"]]
assert [handler for handler in after["to_close"] if handler not in new] == before["to_close"]
assert after["by_name"].items() >= before["by_name"].items()
for key in ("disable", "classes", "target", "open"):
    assert after[key] == before[key], key
serve.warning("still here")
logging.root.warning("here too")
assert "still here" in open(sys.argv[1]).read()
assert "here too" in open(sys.argv[1] + ".other").read()
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""
_ENGINE = """
import torch
from replicas.settings import ModelSettings
from replicas.serving.engine_builder import load_model
from replicas.kv.nixl_transport import NixlTransport
from replicas.serving.decode_replica import DecodeReplica
from replicas.serving.prefill_replica import PrefillReplica
load_model(ModelSettings(sys.argv[2], "", "float32", 128, "auto", False), torch.device("cpu"))
NixlTransport(torch.zeros(4, 16), "replica", "epoch", "fingerprint").close()
"""
_TOKENIZER = """
import opentelemetry.sdk.trace
from cluster.serving.ingress import _load_tokenizer
from cluster.http.app import build_http_app
_load_tokenizer(sys.argv[2], False)
"""


def imported(body: str, folder: Path) -> set[str]:
    """Run in a process of its own, before and after which logging is compared. Returns the packages it imported."""
    answer = subprocess.run(
        [sys.executable, "-c", _PREPARED + body + _COMPARED, str(folder / "serve.log"), model_folder()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return set(json.loads(answer.stdout.splitlines()[-1]))


def test_importing_nixl_touches_nothing(tmp_path: Path) -> None:
    assert "nixl_cu13" in imported("import replicas.kv.nixl_transport\n", tmp_path)


def test_what_an_engine_imports_and_loads_touches_nothing(tmp_path: Path) -> None:
    assert {"nixl_cu13", "torch", "transformers", "zmq"} <= imported(_ENGINE, tmp_path)


def test_what_an_ingress_imports_and_loads_touches_nothing(tmp_path: Path) -> None:
    found = imported(_TOKENIZER, tmp_path)
    assert {"transformers", "zmq", "fastapi", "opentelemetry"} <= found
    assert "nixl_cu13" not in found


# -- alone -----------------------------------------------------------------------------------------

CONFIG = {"version": 1, "handlers": {"theirs": {"class": "logging.StreamHandler"}}, "root": {"handlers": ["theirs"]}}


class Remembering(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.num_closed = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def close(self) -> None:
        self.num_closed += 1
        super().close()


@pytest.fixture
def handler() -> Iterator[Remembering]:
    handler = Remembering()
    handler.set_name("ours")
    logger = logging.getLogger("tests.kept_logging")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    handler.close()


def test_a_config_that_closes_and_disables_all_does_neither(handler: Remembering) -> None:
    logger = logging.getLogger("tests.kept_logging")
    root_before = list(logging.root.handlers)
    buffered = logging.handlers.MemoryHandler(100, target=handler, flushLevel=logging.ERROR)
    logger.handlers = [buffered]
    logger.warning("buffered before")
    with kept_logging():
        logging.config.dictConfig({**CONFIG, "disable_existing_loggers": True})
        logging.disable(logging.CRITICAL)
        logger.setLevel(logging.CRITICAL)
        logger.addFilter(lambda record: False)
        made = logging.getLogger("tests.kept_logging.made")
        made.setLevel(logging.ERROR)
    assert (logger.disabled, logger.level, logger.filters) == (False, logging.NOTSET, [])
    assert logging.root.handlers == root_before
    assert made.level == logging.ERROR
    assert logging._handlers.get("ours") is handler  # type: ignore[attr-defined]
    assert handler.texts == []
    logger.error("flushes")
    assert handler.texts == ["buffered before", "flushes"]
    assert handler.num_closed == 0


def test_without_it_the_same_config_closes_and_disables(handler: Remembering) -> None:
    """The fault is real: in another process, for it is this one's logging that would go."""
    program = """
import logging, logging.config, logging.handlers
memory = logging.handlers.MemoryHandler(1, target=logging.NullHandler())
logger = logging.getLogger("a")
logging.config.dictConfig({"version": 1})
print(memory.target, logger.disabled)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["None", "True"]


def test_what_raises_inside_is_undone_too(handler: Remembering) -> None:
    def failing_import() -> None:
        with kept_logging():
            logging.config.dictConfig(CONFIG)
            raise ImportError

    with pytest.raises(ImportError):
        failing_import()
    logging.getLogger("tests.kept_logging").warning("goes on")
    assert (handler.texts, handler.num_closed) == (["goes on"], 0)


def test_at_the_end_of_the_process_all_are_closed_once_the_newest_first(tmp_path: Path) -> None:
    """Those that were there, that were made inside, and that were let go inside."""
    program = """
import gc, logging, sys
from replicas.kept_logging import kept_logging

class Telling(logging.Handler):
    def __init__(self, name):
        super().__init__()
        self.told = name
    def close(self):
        sys.stdout.write(self.told + "\\n")
        super().close()

first, second, third = Telling("first"), Telling("second"), Telling("third")
with kept_logging():
    made = Telling("made")
    del second
    gc.collect()
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["made", "third", "first"]
