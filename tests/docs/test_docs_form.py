"""README.md and the other documents: short lines, and nothing named in them that is not there."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cluster.config.root import Config
from cluster.monitoring import metric_table
from tests.docs.command_blocks import DOCUMENTS, ROOT

README = ROOT / "README.md"
MAX_LINES, MAX_CHARS = 130, 120
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"[\w./*-]+\.(py|md|yaml|json|jsonl|sh|png|tpl|txt|csv)")
# Files of a reader, of a model or of another project.
_OTHERS = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "serve.yaml", "my.yaml",
    "my-values.yaml", "values.yaml", "values.schema.json", "run.json", "FILE.json", "scheduler.py", "utils.py",
    "common.py", "requirements.txt", "AzureLLMInferenceTrace_conv.csv", "_code.csv",
    "mooncake_conversation_trace.jsonl", "/openapi.json",
}  # fmt: skip
DOCUMENT = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_CHARS] == []


@DOCUMENT
def test_lines_are_short(file: Path) -> None:
    """A row of a table can't be wrapped."""
    lines = file.read_text().splitlines()
    assert [line for line in lines if len(line) > MAX_CHARS and not line.startswith("|")] == []


@DOCUMENT
def test_links_lead_somewhere(file: Path) -> None:
    dead = []
    for link in _LINK.findall(file.read_text()):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@cache
def anchors(file: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@cache
def repository() -> list[Path]:
    folders = ("cluster", "replicas", "scheduler", "tests", "benchmarks", "helm", "docs", "configs", "constraints")
    return [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())


@DOCUMENT
def test_files_that_are_named_are_there(file: Path) -> None:
    """By their path from the root, from the document, or by the end of it."""
    names = {name for name in _CODE.findall(file.read_text()) if _FILE.fullmatch(name)} - _OTHERS
    ends = [f"/{path.relative_to(ROOT)}" for path in repository()]
    assert [name for name in sorted(names) if not is_there(name, file, ends)] == []


def is_there(name: str, file: Path, ends: list[str]) -> bool:
    if "*" in name:
        return any(ROOT.glob(name))
    return (file.parent / name).exists() or any(end.endswith(f"/{name.removeprefix('./')}") for end in ends)


@DOCUMENT
def test_modules_that_are_named_are_there(file: Path) -> None:
    names = {name for name in re.findall(r"python -m ([\w.]+)", file.read_text()) if not name.startswith("pytest")}
    assert [name for name in names if find_spec(name) is None] == []


@DOCUMENT
def test_keys_of_the_config_that_are_named_are_there(file: Path) -> None:
    sections = "|".join(Config.model_fields)
    before = r"config\." if file.parent.name == "helm" else r"(?:config\.)?"  # the chart has an `ingress` of its own
    keys = re.findall(rf"`{before}((?:{sections})\.[a-z_.]+)(?:: [^`]*)?`", file.read_text())
    assert [key for key in set(keys) if not has_key(Config, key.split("."))] == []


def has_key(section: Any, path: list[str]) -> bool:
    """Of a section, or of any section that a field may be."""
    if section is None or not hasattr(section, "model_fields"):
        kinds = getattr(section, "__args__", ())
        return any(has_key(kind, path) for kind in kinds) if kinds else False
    if path[0] not in section.model_fields:
        return False
    return len(path) == 1 or has_key(section.model_fields[path[0]].annotation, path[1:])


@DOCUMENT
def test_metrics_that_are_named_are_there(file: Path) -> None:
    known = Path(metric_table.__file__).read_text() + "".join(
        path.read_text() for path in (ROOT / "replicas/metrics").glob("*.py")
    )
    names = {name.split("{")[0] for name in re.findall(r"splitserve_[a-z_]+[a-z]", file.read_text())}
    endings = r"(_total|_bucket|_sum|_count)$"
    assert [n for n in names if re.sub(endings, "", n).removeprefix("splitserve_") not in known] == []


@DOCUMENT
def test_events_of_the_log_that_are_named_are_there(file: Path) -> None:
    code = "".join(path.read_text() for path in repository() if path.suffix == ".py" and "tests" not in path.parts)
    assert [name for name in re.findall(r"event=([a-z_]+)", file.read_text()) if f'"{name}"' not in code] == []


def test_every_code_of_an_error_is_in_the_document_of_the_api() -> None:
    code = "".join(path.read_text() for path in (ROOT / "cluster").rglob("*.py"))
    known = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs/api.md").read_text().partition("## Errors")[2]))
    codes = set(re.findall(r'code="([a-z_]+)"', code))
    assert len(codes) > 30
    assert sorted(codes - known) == []
