"""Keywords and formats of JSON Schema, each with values around its bound."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
UUID = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"

# keyword or format: schema, a value well inside, one on the bound, one just outside
KEYWORDS: dict[str, tuple[Json, Any, Any, Any]] = {
    "minLength": ({"type": "string", "minLength": 3}, "abcdef", "abc", "ab"),
    "minLength in characters": ({"type": "string", "minLength": 2}, "\U0001f44d" * 5, "\U0001f44d" * 2, "\U0001f44d"),
    "maxLength": ({"type": "string", "maxLength": 3}, "", "abc", "abcd"),
    "maxLength in characters": ({"type": "string", "maxLength": 2}, "a", "\U0001f44d\u00e9", "\U0001f44d\u00e9a"),
    "pattern": ({"type": "string", "pattern": "^[a-z]{2,4}$"}, "abc", "abcd", "abcde"),
    "pattern at its end": ({"type": "string", "pattern": "^[0-9]+$"}, "123", "1", "1\n"),
    "minimum": ({"type": "integer", "minimum": 1}, 5, 1, 0),
    "minimum of a number": ({"type": "number", "minimum": 0.5}, 5, 0.5, 0.49999),
    "maximum": ({"type": "integer", "maximum": 10}, 5, 10, 11),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0}, 5, 5e-324, 0),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 10}, 5, 9, 10),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 10, 0, 11),
    "multipleOf a fraction": ({"type": "number", "multipleOf": 0.01}, 19.99, 0.01, 0.015),
    "enum": ({"enum": ["red", "blue", 3, None]}, "red", None, "green"),
    "enum keeps case": ({"enum": ["red"]}, "red", "red", "Red"),
    "const": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [1.0]}, {"a": [1, 1]}),
    "type integer": ({"type": "integer"}, 5, 5.0, 5.5),
    "type integer is no boolean": ({"type": "integer"}, 1, 0, True),
    "type number": ({"type": "number"}, 5, 10**30, "5"),
    "type string": ({"type": "string"}, "a", "", 1),
    "type boolean": ({"type": "boolean"}, True, False, 0),
    "type null": ({"type": "null"}, None, None, 0),
    "format date-time": (
        {"type": "string", "format": "date-time"},
        "2026-01-02T03:04:05Z",
        "2016-12-31T23:59:60Z",
        "2026-01-02",
    ),
    "format date-time has a zone": (
        {"format": "date-time"},
        "2026-01-02T03:04:05.678+02:00",
        "2024-02-29T00:00:00Z",
        "2026-01-02T03:04:05",
    ),
    "format date-time has real days": (
        {"format": "date-time"},
        "2026-02-28T03:04:05Z",
        "2024-02-29T00:00:00Z",
        "2026-02-29T00:00:00Z",
    ),
    "format uri": ({"type": "string", "format": "uri"}, "https://example.com/a?b#c", "urn:x", "/relative"),
    "format uri without spaces": ({"format": "uri"}, "mailto:a@example.com", "http://a", "http://a b"),
    "format email": ({"type": "string", "format": "email"}, "ada@example.com", "a@b", "ada"),
    "format email has a domain": ({"format": "email"}, "a.b+c@example.com", "a@b.c", "a@"),
    "format uuid": ({"type": "string", "format": "uuid"}, UUID, UUID.upper(), UUID.replace("-", "")),
}
