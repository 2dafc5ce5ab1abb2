"""What all parts of the config share: strictness, and the types of values that several of them use."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import CoreSchema, core_schema

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")

_NODE_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Section(BaseModel):
    """One part of the config: frozen, and strict. An unknown key is an error; "1" and true are not numbers."""

    # revalidate_instances: a section left out of a file is checked against the machine like one that is there.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        revalidate_instances="always",
    )


@dataclass(frozen=True, slots=True)
class OneOf:
    """Of a text: only the names in this table are allowed. For what is chosen by its name in a registry."""

    names: Collection[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema([*self.names])


def base_dir_of(info: ValidationInfo) -> Path | None:
    """Folder of the file being loaded; None when a config is built in code, and files are then not looked for."""
    base_dir = (info.context or {}).get("base_dir")
    return base_dir if isinstance(base_dir, Path) else None


def absolute_path(path: Path, info: ValidationInfo) -> Path:
    """`~` expanded; a relative path counts from the config file's folder, as replicas have other working folders."""
    # Not Path.resolve: a model folder that is a symbolic link keeps the name that the user gave it.
    return Path(os.path.abspath((base_dir_of(info) or Path.cwd()) / path.expanduser()))  # noqa: PTH100


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_host(text: str) -> str:
    looks_like_ip = not text.strip("0123456789.")
    if _is_ip_address(text) or (_HOST_NAME.fullmatch(text) and not looks_like_ip):
        return text
    raise ValueError('is no host name or IP address; expected one of those, without "http://" and without a port')


def _check_label(text: str) -> str:
    if _NODE_LABEL.fullmatch(text) and len(text.rpartition("/")[2]) <= 63:
        return text
    raise ValueError('is no label; expected letters, digits, "-", "_" and ".", after a prefix and "/" if any')


Host = Annotated[str, AfterValidator(_check_host)]
# Labels that the node of a replica must have. Ray would take "!x" and "in(a,b)" for operators: equality is enough.
NodeLabels = dict[Annotated[str, AfterValidator(_check_label)], Annotated[str, AfterValidator(_check_label)]]
Port = Annotated[int, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
# Ray resources: logical numbers that only decide how many replicas a node takes.
Cpus = Annotated[float, Field(ge=0, le=1_024)]
Gpus = Annotated[float, Field(ge=0, le=64)]
LocalPath = Annotated[Path, Field(strict=False), AfterValidator(absolute_path)]
