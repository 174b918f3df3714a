"""Versions: which texts are versions, which version a spec finds, and how far one version is from another."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.contract.versions import bump_between, common, may_break, parse_version, predecessor, resolve
from interlock.core.errors import Failure

SEED = ("1.0.0", "1.1.0", "1.2.0", "2.0.0")
PART_OF_04 = pytest.mark.part_of("REG-04", rest="the pin of a composite, of which there are none yet")


def outcome(call: Callable[[], str]) -> str | Failure:
    try:
        return call()
    except Failure as failure:
        return failure


def refused(code: str, call: Callable[[], Any]) -> Failure:
    with pytest.raises(Failure) as caught:
        call()
    assert caught.value.code == code
    return caught.value


# A second, plain implementation to compare with: precedence as SemVer 11 writes it, ranges as sets of tuples.


class Parsed(NamedTuple):
    core: tuple[int, int, int]
    tags: tuple[str, ...]


def read(text: str) -> Parsed:
    plain = text.partition("+")[0]
    core, _, tags = plain.partition("-")
    major, minor, patch = (int(part) for part in core.split("."))
    return Parsed((major, minor, patch), tuple(tags.split(".")) if tags else ())


def rank(text: str) -> Any:
    core, tags = read(text)
    return core, not tags, [(not tag.isdigit(), int(tag) if tag.isdigit() else 0, tag) for tag in tags]


def caret_line(core: tuple[int, int, int]) -> tuple[int, ...]:
    return core[:1] if core[0] else core[:2] if core[1] else core


def meets(op: str, bound: str, version: str) -> bool:
    """Whether one operator before a full version admits another version, pre-releases judged as npm does."""
    want, have = read(bound), read(version)
    if have.tags and not (want.tags and want.core == have.core):
        return False
    here, there = rank(version), rank(bound)
    line = {"^": caret_line(want.core), "~": want.core[:2]}.get(op)
    if line is not None:
        return here >= there and have.core[: len(line)] == line
    return {"": here == there, "<": here < there, "<=": here <= there, ">": here > there, ">=": here >= there}[op]


def oracle(matching: list[str], deprecated: set[str]) -> str | None:
    return max([text for text in matching if text not in deprecated] or matching, key=rank, default=None)


number = st.integers(0, 3)
tags = st.sampled_from(["", "", "", "-0", "-1", "-a", "-a.1", "-a.b", "-b.2", "-rc.10", "-rc.9"])
version_texts = st.builds("{}.{}.{}{}".format, number, number, number, tags)
registries = st.lists(version_texts, unique=True, max_size=12)


def answer(spec: str | None, versions: list[str], deprecated: set[str]) -> str | None:
    found = outcome(lambda: resolve(spec, versions, deprecated=deprecated))
    if isinstance(found, str):
        return found
    assert found.code == "E3102"
    assert all(text in found.message for text in versions)
    return None


@PART_OF_04
@settings(max_examples=400, deadline=None)
@given(registries, st.sampled_from(["", "^", "~", "<", "<=", ">", ">="]), version_texts, st.data())
def test_the_resolver_finds_what_a_search_of_all_versions_finds(
    versions: list[str], op: str, bound: str, data: st.DataObject
) -> None:
    deprecated = set(data.draw(st.lists(st.sampled_from(versions)))) if versions else set[str]()
    shuffled = data.draw(st.permutations(versions))
    matching = [text for text in versions if meets(op, bound, text)]
    assert answer(op + bound, list(shuffled), deprecated) == oracle(matching, deprecated)


@PART_OF_04
@settings(max_examples=200, deadline=None)
@given(registries, st.sampled_from([None, "LATEST", "latest", " Latest ", "*", "MAJOR.x", "MAJOR"]), number, st.data())
def test_latest_and_wildcards_find_the_highest_release(
    versions: list[str], form: str | None, major: int, data: st.DataObject
) -> None:
    deprecated = set(data.draw(st.lists(st.sampled_from(versions)))) if versions else set[str]()
    releases = [text for text in versions if not read(text).tags]
    if form is not None and form.startswith("MAJOR"):
        form = form.replace("MAJOR", str(major))
        releases = [text for text in releases if read(text).core[0] == major]
    assert answer(form, versions, deprecated) == oracle(releases, deprecated)


@settings(max_examples=200, deadline=None)
@given(registries, st.lists(st.tuples(st.sampled_from(["", "^", "~", "<", ">="]), version_texts), max_size=3))
@PART_OF_04
def test_ranges_from_several_sides_meet_in_the_highest_common_version(
    versions: list[str], ranges: list[tuple[str, str]]
) -> None:
    matching = [text for text in versions if all(meets(op, bound, text) for op, bound in ranges)]
    if not ranges:
        matching = [text for text in versions if not read(text).tags]
    specs = [None, *(op + bound for op, bound in ranges), "LATEST"]
    if matching:
        assert common(specs, versions) == oracle(matching, set())
    else:
        refused("E3103", lambda: common(specs, versions))


@PART_OF_04
@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("^1.0.0", "1.2.0"),
        ("~1.1.0", "1.1.0"),
        (None, "2.0.0"),
        ("LATEST", "2.0.0"),
        ("1.x", "1.2.0"),
        ("1", "1.2.0"),
        ("*", "2.0.0"),
        ("1.1.0", "1.1.0"),
        ("=1.1.0", "1.1.0"),
        ("v1.1.0", "1.1.0"),
        (">=1.0.0 <2.0.0", "1.2.0"),
        (">= 1.0.0 < 1.2", "1.1.0"),
        ("1.0.0 - 1.1", "1.1.0"),
        ("^3.0.0 || ~1.0.0", "1.0.0"),
        ("<=1.1", "1.1.0"),
        (">1", "2.0.0"),
    ],
)
def test_the_seeds_versions_answer_every_form_of_spec(spec: str | None, found: str) -> None:
    assert resolve(spec, SEED) == found
    assert resolve(spec, tuple(reversed(SEED))) == found


@PART_OF_04
def test_no_match_is_not_found_and_no_common_version_is_a_conflict() -> None:
    failure = refused("E3102", lambda: resolve("^3.0.0", SEED))
    assert "1.0.0" in failure.message
    assert failure.details == {"available": ["2.0.0", "1.2.0", "1.1.0", "1.0.0"]}
    refused("E3102", lambda: resolve(None, ()))
    refused("E3103", lambda: common(["^1.0.0", "^2.0.0"], SEED))
    assert common(["1.x", "<1.2.0", None], SEED) == "1.1.0"


def test_deprecated_versions_come_last_but_can_be_pinned() -> None:
    assert resolve(None, SEED, deprecated=["2.0.0"]) == "1.2.0"
    assert resolve("^1.0.0", SEED, deprecated=["1.2.0"]) == "1.1.0"
    assert resolve("2.0.0", SEED, deprecated=["2.0.0"]) == "2.0.0"
    assert resolve("2.x", SEED, deprecated=["2.0.0"]) == "2.0.0"
    assert resolve(None, SEED, deprecated=SEED) == "2.0.0"


def test_a_pre_release_has_to_be_asked_for() -> None:
    versions = ["1.0.0", "1.1.0-rc.1", "2.0.0-rc.1"]
    assert resolve(None, versions) == resolve("*", versions) == resolve("^1.0.0", versions) == "1.0.0"
    assert resolve("^1.1.0-rc.0", versions) == resolve("1.1.0-rc.1", versions) == "1.1.0-rc.1"
    refused("E3102", lambda: resolve("1.1.0", versions))
    refused("E3102", lambda: resolve(None, ["1.0.0-rc.1"]))
    refused("E3102", lambda: resolve("^1.0.0 >=2.0.0-a", versions))
    refused("E3103", lambda: common(["^1.0.0", "1.1.0-rc.1"], versions))


def test_build_metadata_decides_nothing_but_ties_and_ties_do_not_depend_on_order() -> None:
    versions = ["1.0.0+b", "1.0.0+a", "1.0.0+01", "1.0.0+1"]
    assert resolve("^1.0.0", versions) == resolve("1.0.0", versions[::-1]) == "1.0.0+b"
    assert resolve("1.0.0+01", versions) == "1.0.0+01"
    assert resolve("1.0.0", [*versions, "1.0.0"], deprecated=["1.0.0"]) == "1.0.0"
    refused("E3102", lambda: resolve("=1.0.0+c", versions))


spec_like = st.text(alphabet="0123456789.xX*^~<>=|- vLATESTlatest+ab\n٣", max_size=30)


@settings(max_examples=1000, deadline=None)
@given(st.one_of(st.text(max_size=300), spec_like, st.text(alphabet="9.-|", min_size=200, max_size=300)))
def test_whatever_text_is_sent_as_a_spec_only_a_failure_can_come_back(text: str) -> None:
    for call in (lambda: resolve(text, SEED), lambda: common([text, "1.x"], SEED)):
        found = outcome(call)
        assert found in SEED if isinstance(found, str) else found.code in ("E3004", "E3102", "E3103")


@pytest.mark.parametrize(
    "spec", ["", "  ", "^1.0.0 ||", "1.x.3", "1.2.x-a", "01.0.0", "1.0.0-", "one", "^1.0.0,2", "9" * 257]
)
def test_a_malformed_spec_says_how_to_write_one(spec: str) -> None:
    assert "`^1.2.0`" in refused("E3004", lambda: resolve(spec, SEED)).message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1.2",
        "v1.2.3",
        "1.2.3-",
        "1.2.3-A",
        "1.2.3-a-b",
        "01.2.3",
        "1.2.3-01",
        "1.2.3-a..b",
        "1.2.3+",
        "1.2.3\n",
        "١.2.3",
        "1" * 5000 + ".0.0",
    ],
)
def test_a_text_outside_the_pattern_or_outside_semver_is_no_version(text: str) -> None:
    refused("E3105", lambda: parse_version(text))


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=20), st.text(alphabet="01.-+aZ", max_size=20), version_texts))
def test_a_version_is_read_if_and_only_if_it_fits_the_pattern_and_semver(text: str) -> None:
    identifiers = re.split(r"[.-]", text.partition("+")[0])
    sound = all(part and not re.fullmatch(r"0[0-9]+", part) for part in identifiers)
    build = text.partition("+")[2]
    sound = sound and ("+" not in text or all(build.split(".")))
    fits = re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9.]+)?(\+[a-z0-9.]+)?", text) is not None
    found = outcome(lambda: str(parse_version(text)))
    assert found == text if fits and sound else isinstance(found, Failure) and found.code == "E3105"


@pytest.mark.parametrize(
    ("old", "new", "bump", "breaks"),
    [
        ("1.0.0", "1.0.0", "none", False),
        ("1.0.1", "1.0.0", "none", False),
        ("1.0.0+a", "1.0.0+b", "none", False),
        ("1.0.0", "1.0.1", "patch", False),
        ("1.0.0-rc.1", "1.0.0", "patch", False),
        ("1.0.9", "1.1.0", "minor", False),
        ("1.9.9", "2.0.0-rc.1", "major", True),
        ("0.1.0", "0.1.1", "patch", False),
        ("0.1.0", "0.2.0", "minor", True),
        ("0.2.0", "1.0.0", "major", True),
    ],
)
def test_a_bump_is_the_first_part_that_rises(old: str, new: str, bump: str, breaks: bool) -> None:
    assert bump_between(old, new) == bump
    assert may_break(old, new) is breaks


def test_a_version_is_measured_against_the_release_below_it() -> None:
    versions = ["1.0.0", "1.1.0", "1.1.1-rc.1", "2.0.0"]
    assert predecessor("1.1.1", versions) == "1.1.0"
    assert predecessor("3.0.0", versions) == "2.0.0"
    assert predecessor("1.0.0", versions) is None
