"""What somebody sends who means harm: schemas, regular expressions and grammars, some 300 of them, made here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cluster.grammars.grammar_source import GrammarSource

FIELDS = {
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}
_MOST_BYTES = 65_000
_STRING = {"type": "string"}


def hostile_sources() -> Iterator[tuple[str, GrammarSource]]:
    """With a name each. None is larger than the config lets pass."""
    for name, schema in _schemas():
        text = json.dumps(schema, separators=(",", ":"))
        if len(text) <= _MOST_BYTES:
            yield name, GrammarSource("json_schema", text)
    for name, text in _raw_schemas():
        yield name, GrammarSource("json_schema", text)
    for number, expression in enumerate(_expressions()):
        if len(expression) <= _MOST_BYTES:
            yield f"regex {number}", GrammarSource("regex", expression)
            pattern = json.dumps({"type": "string", "pattern": expression})
            if len(pattern) <= _MOST_BYTES:
                yield f"pattern {number}", GrammarSource("json_schema", pattern)
    for name, grammar in _grammars():
        if len(grammar) <= _MOST_BYTES:
            yield name, GrammarSource("grammar", grammar)
    for number in (10, 100, 1_000):
        yield f"{number} choices", GrammarSource("choice", json.dumps(["x" * 30 + str(i) for i in range(number)]))
        yield f"{number} like choices", GrammarSource("choice", json.dumps(["x" * (i % 60) for i in range(number)]))


def body_of(source: GrammarSource) -> bytes:
    """A whole body, written by hand where no JSON library would."""
    text = source.text if source.kind in ("json_schema", "choice") else json.dumps(source.text)
    fields = f'"messages":[{{"role":"user","content":"hi"}}],"max_tokens":1,"{FIELDS[source.kind]}":{text}'
    return f'{{"prompt":"hi",{fields}}}'.encode()


def made_new(source: GrammarSource, number: int) -> GrammarSource:
    """As much work, but that nobody has seen it: of what has room for a remark. Number 0: as it is."""
    if number and source.kind == "json_schema" and source.text.startswith('{"'):
        return replace(source, text=f'{{"$comment":"{number}",{source.text[1:]}')
    if number and source.kind == "grammar":
        return replace(source, text=f"{source.text}\n# {number}")
    return source


def _schemas() -> Iterator[tuple[str, Any]]:
    yield from _nested()
    yield from _referring()
    yield from _wide()
    yield from _of_numbers()
    yield from _intersected()


def _nested() -> Iterator[tuple[str, Any]]:
    for depth in (5, 10, 14, 20, 31):
        for word in ("anyOf", "oneOf", "allOf"):
            # Each level has the one below twice: so many branches as 2 to the power of depth.
            schema: Any = {"type": "object", "properties": {"end": _STRING}}
            for level in range(min(depth, 11)):
                schema = {word: [schema, {**schema, "title": str(level)}]}
            yield f"{word} {depth} deep", schema
            narrow: Any = _STRING
            for level in range(depth):
                narrow = {word: [narrow, {"type": "object", "properties": {f"p{level}": _STRING}}]}
            yield f"{word} {depth} deep, narrow", narrow
        for word in ("items", "additionalProperties", "not", "if"):
            schema = _STRING
            for _ in range(depth):
                schema = {word: schema}
            yield f"{word} {depth} deep", schema


def _referring() -> Iterator[tuple[str, Any]]:
    for reference in (
        "#",
        "#/$defs/a",
        "#/properties/a",
        "http://127.0.0.1:1/x",
        "file:///etc/passwd",
        "#/nowhere",
        "#/%",
        "",
        "urn:x",
        "../x",
        "#/$defs/a/$defs/a",
        "https://json-schema.org/draft/2020-12/schema",
    ):
        yield f"$ref {reference}", {"$ref": reference}
        yield (
            f"property $ref {reference}",
            {
                "type": "object",
                "properties": {"a": {"$ref": reference}},
                "required": ["a"],
                "$defs": {"a": {"$ref": "#/$defs/a"}},
            },
        )
    for number in (10, 30, 100, 500):
        names = [f"a{i}" for i in range(number)]
        chain = {name: {"$ref": f"#/$defs/{below}"} for name, below in itertools.pairwise(names)}
        yield f"chain of {number} references", {"$ref": "#/$defs/a0", "$defs": {**chain, names[-1]: _STRING}}
        for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
            doubled = {name: {word: [{"$ref": f"#/$defs/{below}"}] * 2} for name, below in itertools.pairwise(names)}
            yield f"{word} doubled {number} times", {"$ref": "#/$defs/a0", "$defs": {**doubled, names[-1]: _STRING}}
    mutual = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{j}"} for j in range(12)]} for i in range(12)}
    yield "all refer to all", {"$ref": "#/$defs/a0", "$defs": mutual}
    mutual = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{j}"} for j in range(12)]} for i in range(12)}
    yield "all of all", {"$ref": "#/$defs/a0", "$defs": mutual}


def _wide() -> Iterator[tuple[str, Any]]:
    for number in (100, 499, 1_500, 3_000):
        properties = {f"p{i}": _STRING for i in range(number)}
        yield f"{number} properties", {"type": "object", "properties": properties}
        yield f"{number} required", {"type": "object", "properties": properties, "required": list(properties)}
        yield f"{number} required only", {"type": "object", "required": list(properties)}
        yield f"{number} of any type", {"type": "object", "properties": dict.fromkeys(properties, True)}
        yield f"{number} enum values", {"enum": [f"x{i}" for i in range(number)]}
        yield f"{number} enum objects", {"enum": [{"a": i, "b": [i]} for i in range(number)]}
        yield f"{number} anyOf", {"anyOf": [{"const": f"x{i}"} for i in range(number)]}
        yield f"{number} oneOf", {"oneOf": [{"const": i} for i in range(number)]}
        yield f"{number} prefixItems", {"type": "array", "prefixItems": [_STRING] * number}
        yield f"{number} definitions", {"$defs": {f"d{i}": _STRING for i in range(number)}, **_STRING}
        yield f"{number} types", {"type": ["string"] * number}
    for number in (5, 20, 63):
        like = {f"^p{i}.*[ab]{{20}}$": _STRING for i in range(number)}
        yield f"{number} patternProperties", {"type": "object", "patternProperties": like}
        apart = {f"^p{i}_[a-z]{{0,20}}$": {"type": "integer"} for i in range(number)}
        yield f"{number} patternProperties apart", {"type": "object", "patternProperties": apart}
    yield "a long const", {"const": "x" * 60_000}
    yield "a long key", {"type": "object", "properties": {"k" * 60_000: _STRING}, "required": ["k" * 60_000]}
    yield "a long title", {"title": "x" * 60_000}


def _of_numbers() -> Iterator[tuple[str, Any]]:
    for number in (0, -1, 1.5, 10**3, 10**9, 2**53, 10**18, 1e300, "1", None, [1]):
        for word in (
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "minProperties",
            "maxProperties",
            "multipleOf",
            "minimum",
            "exclusiveMaximum",
        ):
            kind = {"Items": "array", "Length": "string", "Properties": "object"}.get(word[3:], "number")
            yield f"{word} {number}", {"type": kind, word: number}
    yield "primes", {"type": "integer", "allOf": [{"multipleOf": n} for n in (999_983, 999_979, 999_961)]}
    yield "a prime", {"type": "integer", "multipleOf": 1_000_000_007}
    yield "a fraction", {"type": "number", "multipleOf": 0.000_001_234_567}


def _intersected() -> Iterator[tuple[str, Any]]:
    for number in (4, 8, 12, 14, 16, 30, 60):
        yield (
            f"{number} patterns at once",
            {"allOf": [{"type": "string", "pattern": f".*[ab]{{{i}}}.*"} for i in range(number)]},
        )
        yield (
            f"{number} patterns that exclude",
            {"allOf": [{"type": "string", "pattern": f"^.{{{i}}}a.*$"} for i in range(number)]},
        )
        yield (
            f"{number} times either",
            {
                "allOf": [
                    {"anyOf": [{"type": "string", "maxLength": i + 1}, {"type": "integer", "maximum": i}]}
                    for i in range(number)
                ]
            },
        )
        yield (
            f"{number} times one of",
            {
                "allOf": [
                    {"oneOf": [{"properties": {f"p{i}": _STRING}}, {"properties": {f"q{i}": _STRING}}]}
                    for i in range(number)
                ]
            },
        )


def _raw_schemas() -> Iterator[tuple[str, str]]:
    yield "a number of 10,000 digits", '{"type":"integer","minimum":' + "1" * 300 + "}"
    yield "a schema of 1,000 levels", '{"items":' * 1_000 + "{}" + "}" * 1_000
    for depth in (33, 900, 1_025, 20_000):
        yield f"a value of {depth} levels", '{"const":' + "[" * depth + "]" * depth + "}"
    yield "no keys", "{}"
    for text in (
        '{"type":"object","x-guidance":{"lenient":true},"not":{}}',
        '{"properties":{"a":{"x-guidance":1}}}',
        '{"type":7}',
        '{"properties":[]}',
        '{"properties":{"a":1}}',
        '{"enum":{}}',
        '{"enum":[]}',
        '{"required":"a"}',
        '{"anyOf":{}}',
        '{"anyOf":[]}',
        '{"items":[1]}',
        '{"pattern":1}',
        '{"$ref":1}',
        '{"$defs":1,"$ref":"#/$defs/a"}',
        '{"format":1}',
        '{"const":1e400}',
        '{"type":"string","format":"\\u0000"}',
        '{"$schema":"http://127.0.0.1:1/"}',
        '{"$id":"http://127.0.0.1:1/","$ref":"x"}',
        '{"$anchor":1}',
    ):
        yield text, text


def _expressions() -> Iterator[str]:
    yield from (
        "[",
        "(",
        ")",
        "*",
        "a{",
        "a{5,1}",
        "a{1000000000000}",
        "\\",
        "(?=a)",
        "(?<=a)b",
        "(a)\\1",
        "\\b",
        "a^b",
        "^(.*)$",
        "(?m)^a$",
        "[^\\s\\S]",
        "[z-a]",
        "(?P<n>a)(?P<n>a)",
        "\\p{Nothing}",
        "\x00",
        "\ud7ff",
        "(?#",
        "$",
    )
    yield from (
        "(a{0,1000}){0,1000}",
        "((a{0,100}){0,100}){0,100}",
        "(x+x+)+y",
        "(a*)*b",
        "(a|aa)+$",
        "(.*)(.*)(.*)z",
        "[ab]*a[ab]{30}",
        "[ab]*a[ab]{300}",
        ".*a.{1000}",
        "(.*a){20}",
        "(?i)" + "k" * 1_000,
        "a{0,1000000}",
        "(a{0,1000000}){0,1000000}",
        r"\p{L}{0,1000}",
        r"[\s\S]{1000,2000}",
        "(" * 1_000 + "a" + ")" * 1_000,
    )
    for number in (10, 100, 500, 2_000):
        yield ".*" * number + "x"
        yield "(a|b|ab)*" * number
        yield "a?" * number + "a" * number
        yield "|".join(f"{i}[0-9]{{0,{i}}}" for i in range(number))
        yield "(" * number + "a" + ")*" * number
        yield "[" + "".join(chr(0x400 + 2 * i) for i in range(number)) + "]+"
        yield f"(.{{{number}}}|..)*"
    yield "a" * 60_000
    yield "é" * 20_000
    yield "(?:" + "|".join(f"w{i}" for i in range(6_000)) + ")"


def _grammars() -> Iterator[tuple[str, str]]:
    yield from _broken_grammars()
    for number in (10, 100, 1_000, 3_000):
        for case in ("a", "A"):
            chain = "\n".join(f"{case}{i}: {case}{i + 1}" for i in range(number))
            yield f"chain of {number} {case}", f'start: {case}0\n{chain}\n{case}{number}: "x"'
            twice = "\n".join(f"{case}{i}: {case}{i + 1} {case}{i + 1}" for i in range(number))
            yield f"doubled {number} times {case}", f'start: {case}0\n{twice}\n{case}{number}: "x"'
        yield f"{number} brackets", "start: " + "(" * number + '"a"' + ")" * number
        yield f"{number} options", "start: " + "[" * number + '"a"' + "]" * number
        yield f"{number} of not", "start: A\nA: " + "~(" * number + "/a/" + ")" * number
        yield f"{number} alternatives", "start: " + " | ".join(f'"{i}"' for i in range(number))
        yield (
            f"{number} at once",
            "start: A\nA: " + " & ".join(f"/.*{chr(97 + i % 26)}.{{{i}}}.*/" for i in range(number)),
        )
        yield f"{number} levels of JSON", "start: %json " + '{"items":' * number + "{}" + "}" * number
        yield f"GBNF of {number} brackets", "root ::= " + "(" * number + '"a"' + ")" * number
        yield (
            f"GBNF chain of {number}",
            "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(number)) + f'\na{number} ::= "x"',
        )
        yield f"GBNF of {number} alternatives", "root ::= " + " | ".join(f'"{i}"' for i in range(number))


def _broken_grammars() -> Iterator[tuple[str, str]]:
    for text in (
        "start: start",
        'start: start start | "a"',
        'start: start start start | "a" | ""',
        "start: a\na: b\nb: a",
        'start: (("a"?)*)*',
        'start: ("a"*)* ("a"*)* "b"',
        'start: "a"{1000000000}',
        'start: a{0,1000000000}\na: "b" "c"',
        'start: a\na[temperature=0.5]: "b"',
        'start: %json {"format":"x","x-guidance":{"lenient":true}}',
        "start: @other",
        "start: <nonexistent>",
        "start: /(?=a)/",
        "start: /[/",
        "start:",
        "root ::=",
        "root ::= root",
        'root ::= root root | "a"',
        "start: a",
        "%import x.y\nstart: y",
        '%ignore /(a*)*/\nstart: "a"',
        "::=",
        'start ::= "a"',
        "root ::= [",
        'root ::= "a',
        "root ::= \\",
        'root ::= "a"{99999999999}',
        "# no rule",
        '%llguidance {"x":1}\nstart: "a"',
    ):
        yield text, text
    yield "a long literal", 'start: "' + "x" * 60_000 + '"'
    yield "GBNF of a long comment", 'root ::= "a"\n' + "#" * 60_000
