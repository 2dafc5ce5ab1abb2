"""Who may call the HTTP API, and from which web pages."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from cluster.config.section import LocalPath, Section, base_dir_of


def _check_path(path: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9/._-]*", path):
        raise ValueError("is no path; expected one such as /health, which begins with a slash")
    return path


def _check_origin(origin: str) -> str:
    if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
        raise ValueError('is no origin; expected one such as "https://chat.example.org", without a path, or "*"')
    return origin


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("is no name of an environment variable; expected letters, digits and _")
    return name


RoutePath = Annotated[str, AfterValidator(_check_path)]
Origin = Annotated[str, AfterValidator(_check_origin)]
VariableName = Annotated[str, AfterValidator(_check_variable)]


class AuthConfig(Section):
    """API keys. Without a file and a variable there is no access control."""

    api_keys_file: LocalPath | None = Field(
        default=None,
        description="File with one API key a line; empty lines and lines that begin with # are skipped. Each ingress "
        "reads it when it starts, so on every node that runs one",
    )
    api_keys_env: VariableName | None = Field(
        default=None,
        description="Name of the environment variable that holds API keys, separated by commas. Each ingress reads it "
        "when it starts; its keys count beside those of the file",
    )
    public_paths: list[RoutePath] = Field(
        default=["/health", "/health/ready", "/metrics", "/version"],
        max_length=64,
        description="Exact paths that need no key. Everything else does, if there are keys",
    )

    @field_validator("api_keys_file")
    @classmethod
    def _check_file(cls, file: LocalPath | None, info: ValidationInfo) -> LocalPath | None:
        if file is not None and base_dir_of(info) is not None and not file.is_file():
            raise ValueError("is no existing file")
        return file

    @property
    def is_on(self) -> bool:
        """Whether keys are asked for."""
        return self.api_keys_file is not None or self.api_keys_env is not None


class CorsConfig(Section):
    """Which web pages of other origins may call the API from a browser. By default none."""

    allow_origins: list[Origin] = Field(
        default=[], max_length=256, description='Such as "https://chat.example.org"; "*" for all; empty: CORS is off'
    )
    allow_credentials: bool = Field(
        default=False, description="Let browsers send cookies and HTTP authentication; not together with *"
    )
    max_age_s: int = Field(default=600, ge=0, le=86_400, description="How long a browser remembers that it may")

    @field_validator("allow_credentials")
    @classmethod
    def _check_credentials(cls, allow: bool, info: ValidationInfo) -> bool:
        if allow and "*" in info.data.get("allow_origins", []):
            raise ValueError('would trust every web page with allow_origins "*"; name the origins there')
        return allow
