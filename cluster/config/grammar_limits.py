"""How large what an answer shall follow may be: a JSON schema, a regular expression, a grammar, a list of choices."""

from __future__ import annotations

from pydantic import Field

from cluster.config.section import Section


class GrammarLimits(Section):
    """Part of the config's limits."""

    max_grammar_bytes: int = Field(
        default=65_536,
        ge=64,
        le=1024**2,
        description="Largest JSON schema, regular expression, list of choices or grammar that an answer shall follow",
    )
    max_grammar_depth: int = Field(
        default=32, ge=1, le=100, description="Deepest nesting of objects and arrays in a JSON schema"
    )
    max_schema_properties: int = Field(
        default=500, ge=1, le=5_000, description="Most properties in a JSON schema, of all objects together"
    )
    max_grammar_patterns: int = Field(
        default=64, ge=0, le=1_024, description="Most regular expressions in a JSON schema"
    )
    max_enum_values: int = Field(
        default=1_000, ge=1, le=20_000, description="Most enum values in a JSON schema, and most choices in a list"
    )
    max_grammar_seconds: float = Field(
        default=0.5,
        ge=0.01,
        le=60.0,
        description="CPU time that it may take to compile a schema or grammar, which is mostly milliseconds. Beyond: "
        "it is refused",
    )
