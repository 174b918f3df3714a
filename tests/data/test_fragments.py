"""Pieces of other languages: an attack is refused, a plain piece passes, and nothing is ever changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Field, Interlock, tool
from interlock.data.explain import authoring_faults
from interlock.data.fragments import LANGUAGES, attacks, declares_fragments
from interlock.data.schema import Json, Schema
from tests.support.calls import admit
from tests.support.each import each

KITS = "each sink of the kits for databases, files, messages and browsers, which do not exist yet"

ATTACKS: dict[str, tuple[str, ...]] = {
    "sql": (
        "'; DROP TABLE users; --", "1; DELETE FROM t", "1 OR 1=1", "1 or 'a'='a'", "' OR ''='", "x' --", "x /* y */",
        "1 UNION SELECT password FROM users", "1 uNiOn/**/sElEcT 1", "name) FROM t; --", "sleep(5)", "pg_sleep(10)",
        "(SELECT 1)", "1 && 1", "1 || 1", "a\\'", "`x`", "x#", "load_extension('x')", "1) OR (1", "a\x00b",
        "xp_cmdshell 'dir'", "1 AND 1=1", "x INTO OUTFILE '/tmp/x'", "'", '"', "a'b''",
    ),
    "shell": (
        "a; id", "a|b", "a && b", "$(id)", "`id`", "${HOME}", "a > b", "a < b", "a\nb", "*", "~root", "a b", "-rf",
        "--help", "'x'", '"x"', "a\\b", "", "a\x00b", "!x", "{a,b}", "[a]", "#x", "é",
    ),
    "html": (
        "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "<b onclick=x>a</b>",
        '<a href="javascript:alert(1)">x</a>', '<a href="java&#115;cript:alert(1)">x</a>', "<!-- x -->", "<b",
        '<a href="data:text/html,x">x</a>', '<a href="//evil.example">x</a>', "<iframe>", "<style>*{}</style>",
        '<a href=" javascript:x">x</a>', "a < b <i", "<b\x00>", "<scr<script>ipt>", "<a href='javascript:x'>x</a>",
        "<![CDATA[x]]>", "<?php ?>", '<a href="\\\\evil.example">x</a>', '<p style="x">a</p>', "</textarea>",
        '<a href="vbscript:x">x</a>', '<a href="/\\evil.example">x</a>',
    ),
    "path": (
        "../../etc/passwd", "/etc/passwd", "a/../../b", "..", "%2e%2e/x", "%252e%252e%252fx", "..%2fx", "a\\..\\b",
        "C:\\x", "c:x", "~/x", "~root", "a\x00b", "a\nb", "%2fetc", "%00", "a/..", "%25%32%35%32%35%32%35%32%35",
    ),
    "url": (
        "https://evil.example/", "//evil.example", "javascript:alert(1)", "a@evil.example", "../admin", "a/../../b",
        "%2e%2e/admin", "a b", "a\r\nHost: x", "%0d%0aHost:%20x", "\\\\evil", "a#b", "file:/etc/passwd", "%2f%2fevil",
        "?next=//evil.example", "x?y=../z", "data:x",
    ),
}  # fmt: skip
PLAIN: dict[str, tuple[str, ...]] = {
    "sql": ("name", "price * 2", "lower(name)", "t.created_at DESC", "'it''s'", "coalesce(a, 'none')", "count(*)"),
    "shell": ("main", "feature/x-1", "a@b.example", "v1.2.3", "key=value", "src/main.py"),
    "html": (
        "plain text & more", "<p>Hello <b>you</b></p>", '<a href="https://example.org/x?a=1&b=2" title="t">x</a>',
        '<a href="mailto:a@b.example">x</a>', '<a href="/docs">x</a>', '<a href="page.html">x</a>', "<br/>",
        "line\nline", "a > b",
    ),
    "path": ("a", "a/b.txt", "notes 2026/é.md", "a..b/c", "...", "a%20b"),
    "url": ("users/7", "users/7?sort=name&dir=up", "/v1/x", "a..b", "caf%C3%A9"),
}  # fmt: skip
CASES = [(language, text) for language, texts in ATTACKS.items() for text in texts]
FINE = [(language, text) for language, texts in PLAIN.items() for text in texts]


def schema_of(language: str) -> Schema:
    part: Json = {"type": "string", "x-fragment": language}
    return Schema(
        {
            "type": "object",
            "properties": {
                "one": part,
                "many": {"type": "array", "items": {"$ref": "#/$defs/part"}},
                "either": {"anyOf": [{"type": "null"}, part]},
                "note": {"type": "string"},
            },
            "additionalProperties": {"allOf": [part]},
            "$defs": {"part": part},
        }
    )


@pytest.mark.part_of("VALID-02", rest=KITS)
@each(("language", "text"), CASES)
def test_an_attack_in_a_declared_fragment_is_found_wherever_it_stands(language: str, text: str) -> None:
    schema = schema_of(language)
    for value, at in (({"one": text}, "/one"), ({"many": ["", text][text == "" :]}, "/many"), ({"x": text}, "/x")):
        faults = attacks(schema, value)
        assert any(fault.pointer.startswith(at) for fault in faults)
        assert len(text) < 3 or all(text not in fault.message for fault in faults)
    assert attacks(schema, {"either": text})
    assert attacks(schema, {"note": text, "either": None}) == []


@pytest.mark.part_of("VALID-02", rest=KITS)
@each(("language", "text"), FINE)
def test_a_plain_piece_passes(language: str, text: str) -> None:
    assert attacks(schema_of(language), {"one": text, "many": [text], "either": text, "x": text}) == []


@pytest.mark.part_of("VALID-02", rest=KITS)
@given(language=st.sampled_from(sorted(LANGUAGES)), text=st.text())
def test_text_is_judged_and_never_changed_and_every_text_has_a_verdict(language: str, text: str) -> None:
    value: Json = {"one": text, "note": text}
    before = dict(value)
    faults = attacks(schema_of(language), value)
    assert value == before
    assert [fault.pointer for fault in faults] in ([], ["/one"])


@pytest.mark.part_of("VALID-02", rest=KITS)
@given(st.text())
def test_a_path_that_passes_stays_below_where_it_begins(text: str) -> None:
    if attacks(Schema({"x-fragment": "path"}), text):
        return
    base = Path("/base/here")
    resolved = Path(*(part for part in (base / text).parts if part != "."))
    assert resolved.is_relative_to(base)
    assert ".." not in resolved.parts


def test_a_language_that_there_is_not_is_the_authors_fault() -> None:
    part: Json = {"type": "string", "description": "a piece", "examples": ["a"], "x-fragment": "cobol"}
    (fault,) = authoring_faults({"type": "object", "properties": {"a": part}})
    assert fault.pointer == "/properties/a/x-fragment"
    assert not declares_fragments(Schema(part))


ran: list[Any] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="f", redact_results=False)
async def order(
    by: Annotated[str, Field(description="an expression", examples=["name"], json_schema_extra={"x-fragment": "sql"})],
    note: Annotated[str, Field(description="any text", examples=["a"])] = "",
) -> str:
    """Order something by an expression."""
    ran.append((by, note))
    return by


@pytest.mark.part_of("VALID-02", rest=KITS)
async def test_a_call_with_an_attack_in_a_fragment_is_refused_before_anything_runs(home: Path) -> None:
    ran.clear()
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, order)
        for text in ATTACKS["sql"]:
            error = (await app.call("f.order", by=text, note=text)).error
            assert error is not None
            assert (error.code, error.row.http, error.retryable) == ("E3305", 400, False)
        assert ran == []
        for text in ATTACKS["sql"]:
            await app.call("f.order", by="name", note=text)
        assert ran == [("name", text) for text in ATTACKS["sql"]], "the same text as plain data, letter for letter"
