"""The algebra of grants: what a link covers, and that nothing below a link holds more."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from interlock.call.capability import (
    Capability,
    Link,
    ToolGrant,
    claim_faults,
    holds,
    is_plain,
    link_faults,
    range_within,
    read_above,
    read_link,
    resource_fault,
    scope_fault,
    tool_fault,
    widenings,
    write_above,
    write_link,
)
from interlock.core.errors import Failure
from tests.support.each import each

DID = "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK"
TAGS = ("", "-0", "-0.0", "-a", "-a.0", "-a.1", "-b", "-b.0", "-z")
VERSIONS = [f"{a}.{b}.{c}{tag}" for a, b, c in product(range(4), repeat=3) for tag in TAGS] + ["2.2.2+x", "9.9.9"]


def link(**given: Any) -> Link:
    stated: dict[str, Any] = {
        "jti": "1",
        "subject": DID,
        "scopes": frozenset[str](),
        "tools": (ToolGrant("*"),),
        "not_before": 1000,
        "expires": 2000,
        "constraints": {},
    }
    return Link(**(stated | given))


def chain(*links: Link) -> Capability:
    return Capability(digest="", issuer="", links=links)


# Tools and versions


@pytest.mark.parametrize(
    ("grant", "tool", "version", "covered"),
    [
        (ToolGrant("demo.add"), "demo.add", "1.0.0", True),
        (ToolGrant("demo.add"), "demo.added", "1.0.0", False),
        (ToolGrant("demo.*"), "demo.add", "3.0.0-rc.1", True),
        (ToolGrant("demo.*"), "demon.add", "1.0.0", False),
        (ToolGrant("*"), "mail.send", "0.0.1", True),
        (ToolGrant("demo.add", "^1.0.0"), "demo.add", "1.9.9", True),
        (ToolGrant("demo.add", "^1.0.0"), "demo.add", "2.0.0", False),
        (ToolGrant("demo.add", "^1.0.0"), "demo.add", "2.0.0-a", False),
        (ToolGrant("demo.add", "1.x || >=3.1.0 <4"), "demo.add", "3.1.0", True),
        (ToolGrant("demo.add", "1.x || >=3.1.0 <4"), "demo.add", "2.0.0", False),
    ],
)
@pytest.mark.supports("AUTH-02")
def test_a_grant_covers_the_tools_and_versions_it_names(
    grant: ToolGrant, tool: str, version: str, covered: bool
) -> None:
    assert chain(link(tools=(grant,))).covers(tool, version) is covered


@pytest.mark.supports("AUTH-02")
def test_a_token_without_tools_covers_nothing() -> None:
    assert not chain(link(tools=())).covers("demo.add", "1.0.0")


def test_every_link_of_a_chain_must_cover_the_call() -> None:
    wide, narrow = link(), link(tools=(ToolGrant("demo.add", "^1"),))
    assert chain(wide, narrow, narrow).covers("demo.add", "1.2.0")
    # Even a chain whose last link claims more covers no more than its narrowest one.
    assert not chain(wide, narrow, wide).covers("demo.add", "2.0.0")


def _version(numbers: tuple[int, int, int], tag: str) -> str:
    return ".".join(map(str, numbers)) + tag


small = st.integers(0, 2)
versions = st.builds(_version, st.tuples(small, small, small), st.sampled_from(["", "", "", "-a", "-b", "-a.1"]))
partial = st.sampled_from(["0.x", "1.x", "2.x", "0.1.x", "1.0.x", "1.2.x", "2.1.x"])
block = st.one_of(
    st.builds("{}{}".format, st.sampled_from(["", "=", "^", "~", "<", "<=", ">", ">="]), st.one_of(versions, partial)),
    st.builds("{} - {}".format, versions, versions),
    st.builds(">={} <{}".format, versions, versions),
)
ranges: st.SearchStrategy[str] = st.lists(block, min_size=1, max_size=2).map(" || ".join)
several: st.SearchStrategy[tuple[str, ...]] = st.lists(ranges, min_size=1, max_size=2).map(lambda some: tuple(some))


@given(inner=ranges, outer=several)
def test_a_range_lies_within_others_exactly_when_no_version_escapes(inner: str, outer: tuple[str, ...]) -> None:
    escaping = [one for one in VERSIONS if holds(inner, one) and not any(holds(each, one) for each in outer)]
    assert range_within(inner, outer) == (not escaping), escaping[:5]


@pytest.mark.parametrize(
    ("inner", "outer", "within"),
    [
        ("^1.2.0", ("^1.0.0",), True),
        ("^1.0.0", ("^1.2.0",), False),
        ("1.x || 2.x", ("1.x", "2.x"), True),
        ("1.x || 2.x || 3.x", ("1.x", "2.x"), False),
        ("*", (">=0.0.0",), False),
        (">=0.0.0", ("*",), True),
        ("=1.2.3+b1", ("=1.2.3",), True),
        ("=1.2.3", ("=1.2.3+b1",), False),
        (">=1.2.3-b", (">=1.2.3-a",), True),
        (">=1.2.3-a", (">=1.2.3-b",), False),
    ],
)
def test_known_cases_of_one_range_within_others(inner: str, outer: tuple[str, ...], within: bool) -> None:
    assert range_within(inner, outer) is within


# Resources


@each(
    ("patterns", "resource", "covered"),
    [
        (None, "anything:at/all", True),
        ((), "file:/a", False),
        (("file:/a",), "file:/a", True),
        (("file:/a",), "file:/ab", False),
        (("file:/a/*",), "file:/a/b/c", True),
        (("file:/a/*",), "file:/b", False),
        (("https://h/*",), "https://h/x", True),
        (("file:/a/*",), "file:/a/../b", False),
        (("file:/a/*",), "file:/a/./b", False),
        (("file:/a/*",), "file:/a//b", False),
        (("file:/a/*",), "file:/a/%2e%2E/b", False),
        (("file:/a/*",), "file:/a/%252e/b", False),
        (("file:/a/*",), "file:/a\\..\\b", False),
        (("file:/a/*",), "file:/a/b\n", False),
        (("file:/a/*",), "FILE:/a/b", False),
        (("*",), "file:/a/..", False),
        (("*",), "", False),
    ],
)
def test_resources_are_exact_or_prefixes_and_never_hide_their_meaning(
    patterns: tuple[str, ...] | None, resource: str, covered: bool
) -> None:
    assert chain(link(), link(resources=patterns)).covers_resource(resource) is covered


# Narrowing

TOOLS = ["*", "demo.*", "demo.add", "mail.*", "mail.send"]
PLACES = ["*", "file:/a/*", "file:/a/b", "file:/*", "mail:x"]
CALLS = list(product(("demo.add", "demo.x", "mail.send", "web.get"), ("1.0.0", "1.2.1", "2.0.0-a", "9.9.9")))


@st.composite
def links(draw: st.DrawFn) -> Link:
    begin = draw(st.integers(0, 3))
    tools = draw(st.dictionaries(st.sampled_from(TOOLS), st.just("*") | ranges, max_size=3))
    places = draw(st.none() | st.lists(st.sampled_from(PLACES), max_size=2))
    constraints: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "max_uses": st.integers(1, 3),
                "max_cost": st.sampled_from([0, 0.5, 2]),
                "mutation_class": st.sampled_from(["read_only", "write_reversible", "write_irreversible"]),
                "environments": st.lists(st.sampled_from(["dev", "prod"]), min_size=1, unique=True),
            },
        )
    )
    return link(
        scopes=draw(st.frozensets(st.sampled_from(["a:read", "a:write", "b:*", "c"]))),
        tools=tuple(ToolGrant(tool, within) for tool, within in tools.items()),
        resources=None if places is None else tuple(places),
        constraints=constraints,
        not_before=begin,
        expires=begin + draw(st.integers(1, 3)),
    )


PARTS = ("scopes", "tools", "resources", "constraints", "not_before", "expires")


@st.composite
def families(draw: st.DrawFn) -> tuple[Link, Link]:
    """A link, and one that is like it but for one or two parts."""
    parent, other = draw(links()), draw(links())
    changed = draw(st.sets(st.sampled_from(PARTS), min_size=1, max_size=2))
    return parent, replace(parent, **{part: getattr(other, part) for part in changed})


@given(family=families())
@pytest.mark.supports("AUTH-08")
def test_a_child_without_widenings_covers_nothing_that_its_parent_does_not(family: tuple[Link, Link]) -> None:
    parent, child = family
    assume(not widenings(parent, child))  # too many of them, and Hypothesis fails the test
    assert child.scopes <= parent.scopes
    assert parent.not_before <= child.not_before
    assert child.expires <= parent.expires
    for tool, version in product(
        ("demo.add", "demo.x", "mail.send", "web.get"), ("1.0.0", "1.2.1", "2.0.0-a", "9.9.9")
    ):
        assert parent.covers(tool, version) or not child.covers(tool, version)
    for resource in ("file:/a/b", "file:/a/c", "file:/b", "mail:x", "web:y"):
        assert parent.covers_resource(resource) or not child.covers_resource(resource)
    assert parent.constraints.keys() <= child.constraints.keys()


@given(links())
def test_a_link_is_no_wider_than_itself_and_survives_the_wire(one: Link) -> None:
    assert link_faults(one) == []
    assert widenings(one, one) == []
    assert read_link(write_link(one)) == one
    above = (one, replace(one, jti="2"), replace(one, jti="3"))
    assert read_above(write_above(above)) == above


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scopes": frozenset({"a", "b"})}, "the scope `b`"),
        ({"tools": (ToolGrant("demo.*", "^1.0.0"), ToolGrant("mail.send"))}, "the tool `mail.send`"),
        ({"tools": (ToolGrant("demo.*", "^2.0.0"),)}, "the tool `demo.*` is held above in ^1.0.0 only, not in ^2.0.0"),
        ({"resources": None}, "every resource"),
        ({"resources": ("file:/*",)}, "the resource `file:/*`"),
        ({"constraints": {"mutation_class": "read_only"}}, "`max_uses` is left out"),
        ({"constraints": {"mutation_class": "read_only", "max_uses": 4}}, "`max_uses` is loosened from 3 to 4"),
        ({"constraints": {"mutation_class": "write_reversible", "max_uses": 3}}, "`mutation_class` is loosened"),
        ({"not_before": 999}, "begins before"),
        ({"expires": 2001}, "ends after"),
    ],
)
def test_each_way_to_hold_more_is_told_in_words(change: dict[str, Any], words: str) -> None:
    parent = link(
        scopes=frozenset({"a"}),
        tools=(ToolGrant("demo.*", "^1.0.0"),),
        resources=("file:/a/*",),
        constraints={"max_uses": 3, "mutation_class": "read_only"},
    )
    (told,) = widenings(parent, replace(parent, **change))
    assert words in told


# What a link may say


@pytest.mark.parametrize(
    "scope", ["Mail:send", "mаil:send", "mail send", "", "mail:send\n", "ｍail", "a" * 256, 1, None]
)
def test_scopes_are_plain_lower_case_ascii(scope: Any) -> None:
    assert scope_fault(scope)


@pytest.mark.parametrize(
    "tool",
    ["Demo.add", "demo", "demo.", ".add", "demo.*.x", "*.add", "demo.аdd", "demo.add\n", "d/../x", "d*.add", 7],
)
def test_tools_are_named_in_one_way(tool: Any) -> None:
    assert tool_fault(tool)


@pytest.mark.parametrize("resource", ["a/../b", "*x", "a*b", "ä", "a b", "", "a//b", "a%2fb", "x" * 513, None])
def test_resources_are_stated_plainly(resource: Any) -> None:
    assert resource_fault(resource)


@each(
    "change",
    [
        {"sub": "alice"},
        {"sub": "did:key:"},
        {"sub": "did:key:z6Mk#z6Mk"},
        {"jti": ""},
        {"jti": 5},
        {"exp": 1000},
        {"exp": 2000.5},
        {"exp": True},
        {"nbf": "1000"},
        {"tools": None},
        {"tools": {"tool_id": "*"}},
        {"tools": ["*"]},
        {"tools": [{"tool_id": "*"}]},
        {"tools": [{"tool_id": "*", "version_range": "*", "extra": 1}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "^1"}, {"tool_id": "demo.add", "version_range": "^2"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "LATEST"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "^1.0.0 ||"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "1||2||3||4||5||6||7||8||9"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "^1.0.0-RC"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": 1}]},
        {"tools": [{"tool_id": "*", "version_range": "*"}] * 101},
        {"scopes": "a"},
        {"scopes": ["a", None]},
        {"resources": "file:/a"},
        {"resources": None},
        {"constraints": []},
        {"constraints": {"max_uses": 0}},
        {"constraints": {"max_uses": True}},
        {"constraints": {"max_uses": 1.0}},
        {"constraints": {"max_cost": -1}},
        {"constraints": {"max_cost": float("inf")}},
        {"constraints": {"mutation_class": "write"}},
        {"constraints": {"environments": []}},
        {"constraints": {"environments": ["Prod"]}},
        {"constraints": {"max_age": 5}},
    ],
)
@pytest.mark.supports("AUTH-01")
def test_claims_of_any_other_form_are_refused(change: dict[str, Any]) -> None:
    claims = write_link(link()) | change
    assert list(claim_faults(claims))
    with pytest.raises(Failure) as refused:
        read_link(claims)
    assert refused.value.code == "E3203"


@pytest.mark.parametrize("act", ["x", [], {"sub": DID}, write_link(link()) | {"scope": "a"}])
def test_a_chain_with_a_link_that_is_none_is_refused(act: Any) -> None:
    with pytest.raises(Failure) as refused:
        read_above(act)
    assert refused.value.code == "E3203"


def test_a_resource_with_a_scheme_and_an_absolute_path_is_plain() -> None:
    assert all(map(is_plain, ("file:///etc/x", "https://host/a/b", "counter:a", "/a/b/", "mail:a@b.example")))
