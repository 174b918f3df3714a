"""Where tools come from: files, modules and manifests, whole or broken."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Interlock
from interlock.contract.manifest import parse_manifest
from interlock.core.errors import Failure
from interlock.registry.admission import examine
from interlock.registry.source import load

Json = dict[str, Any]

PYTHON = '''
from typing import Annotated
from interlock import Field, tool

Name = Annotated[str, Field(description="who is greeted", examples=["ann"])]

@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def greet(name: Name) -> str:
    """Greet somebody by name."""
    return f"hello {name}"

@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
def leave(name: Name) -> str:
    """Take leave of somebody."""
    return f"goodbye {name}"
'''

HANDLERS = """
from interlock import Preview

stock = {"tea": 5}

def take(item, count):
    stock[item] -= count
    return {"left": stock[item]}

async def preview_take(item, count):
    return Preview(impact=f"takes {count} of {item}")

def put_back(result):
    stock["tea"] = 5

def check_take(item, count):
    return [] if count <= stock.get(item, 0) else [f"only {stock.get(item, 0)} of {item} are left"]
"""

MANIFEST: Json = {
    "tool_id": "take",
    "namespace": "shop",
    "version": "1.0.0",
    "name": "Take",
    "description": "Takes items from the stock.",
    "provider": "local",
    "protocol": "native",
    "parameters": {
        "type": "object",
        "properties": {
            "item": {"type": "string", "description": "what is taken", "examples": ["tea"]},
            "count": {"type": "integer", "description": "how many", "examples": [2], "minimum": 1},
        },
        "required": ["item", "count"],
    },
    "result_schema": {"type": "object", "properties": {"left": {"type": "integer"}}, "required": ["left"]},
    "required_permissions": [],
    "timeout_class": "standard",
    "idempotency": {},
    "observability": {},
    "mutation_class": "write_reversible",
    "effects": [{"resource": "stock:{item}", "operation": "UPDATE"}],
    "compensable": True,
    "previews": True,
    "execution": {
        "target": "stock.py:take",
        "handlers": {
            "preview": "stock.py:preview_take",
            "compensate": "stock.py:put_back",
            "check": "stock.py:check_take",
        },
    },
}


def written(directory: Path, name: str, content: str | bytes) -> str:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refused(target: str) -> Failure:
    with pytest.raises(Failure) as caught:
        load(target)
    assert caught.value.code == "E3105"
    # Messages are shown to models: no path, no stack.
    assert not target.startswith("/") or str(Path(target).parent) not in caught.value.message
    assert "Traceback" not in caught.value.message
    return caught.value


async def test_a_python_file_offers_its_tools_and_serves_them_after_a_restart(tmp_path: Path) -> None:
    target = written(tmp_path, "greetings.py", PYTHON)
    async with Interlock.open(tmp_path / "home") as app:
        answers = await app.add_from(target)
        assert [(answer.tool, answer.admitted) for answer in answers] == [
            ("demo.greet@1.0.0", True),
            ("demo.leave@1.0.0", True),
        ]
        assert (await app.call("demo.greet", name="ann")).unwrap() == "hello ann"
    async with Interlock.open(tmp_path / "home") as app:
        assert (await app.call("demo.leave", name="ann")).unwrap() == "goodbye ann"


async def test_a_module_offers_its_tools_and_serves_them_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "greetings_of_a_module.py", PYTHON)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    async with Interlock.open(tmp_path / "home") as app:
        assert all(answer.admitted for answer in await app.add_from("greetings_of_a_module"))
    async with Interlock.open(tmp_path / "home") as app:
        assert (await app.call("demo.greet", name="ann")).unwrap() == "hello ann"


@pytest.mark.parametrize("name", ["take.yaml", "take.yml", "take.json"])
async def test_a_manifest_offers_a_tool_with_its_handlers(tmp_path: Path, name: str) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    text = orjson.dumps(MANIFEST) if name.endswith(".json") else yaml.safe_dump(MANIFEST)
    target = written(tmp_path, name, text)
    async with Interlock.open(tmp_path / "home") as app:
        [answer] = await app.add_from(target)
        assert answer.verdict.refused == {}
    async with Interlock.open(tmp_path / "home") as app:
        looked = await app.call("shop.take", item="tea", count=2, dry_run=True)
        assert looked.unwrap()["impact"] == "takes 2 of tea"
        too_many = await app.call("shop.take", item="tea", count=9, key="one")
        assert too_many.error is not None
        assert too_many.error.code == "E3308"
        taken = await app.call("shop.take", item="tea", count=2, key="two")
        assert taken.unwrap() == {"left": 3}
        assert (await app.undo(taken.invocation_id, key="three")).ok
        assert (await app.call("shop.take", item="tea", count=5, key="four")).unwrap() == {"left": 0}


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize("lacks", ["description", "examples"])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_manifest_without_a_description_or_an_example_of_a_property_is_refused(
    tmp_path: Path, lacks: str, inside: bool
) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    count: Json = {"type": "integer", "description": "how many", "examples": [2]}
    del count[lacks]
    item: Json = MANIFEST["parameters"]["properties"]["item"]
    if inside:
        count = {"type": "object", "description": "how many", "examples": [{}], "properties": {"of_each": count}}
    properties = {"item": item, "count": count}
    manifest = MANIFEST | {"parameters": {"type": "object", "properties": properties, "required": ["item", "count"]}}
    async with Interlock.open(tmp_path / "home") as app:
        [answer] = await app.add_from(written(tmp_path, "take.json", orjson.dumps(manifest)))
        (fault,) = answer.verdict.refused["schema_valid"]
        word = {"description": "a description", "examples": "an example"}[lacks]
        assert fault.startswith(f"`count{'.of_each' if inside else ''}` needs {word}")
        missing = await app.call("shop.take", item="tea", count=1, key="k")
        assert missing.error is not None
        assert missing.error.code == "E3101"


@pytest.mark.parametrize("separate", ["list", "documents"])
async def test_one_manifest_file_may_hold_several_tools(tmp_path: Path, separate: str) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    both = [MANIFEST, MANIFEST | {"tool_id": "take_two"}]
    text = yaml.safe_dump_all(both) if separate == "documents" else yaml.safe_dump(both)
    _, tools = load(written(tmp_path, "both.yaml", text))
    assert [each.manifest.address for each in tools] == ["shop.take", "shop.take_two"]


# Broken ones


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ndef broken(:\n    pass\n", 2),
        ("import interlock\n\nraise RuntimeError('not today')\n", 3),
        ("x = 1\nimport no_such_module_anywhere\n", 2),
        ("def f():\n    return 1 / 0\n\n\nf()\n", 2),
        ("x = 1\nraise SystemExit(3)\n", 2),
    ],
    ids=["syntax", "raises", "imports", "calls", "exits"],
)
def test_a_broken_file_is_refused_with_the_line(tmp_path: Path, text: str, line: int) -> None:
    assert f"line {line}" in refused(written(tmp_path, "broken.py", text)).message


def test_a_module_that_breaks_is_refused_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "module_that_breaks.py", "x = 1\nraise RuntimeError('not today')\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    failure = refused("module_that_breaks")
    assert "line 2" in failure.message
    assert "not today" in failure.message


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("bad.yaml", "tool_id: take\nname: [unclosed\nversion: 1\n", 3),
        ("bad.yaml", "tool_id: take\n\tname: tab\n", 2),
        ("bad.json", '{\n "tool_id": "take",\n "name": \n}', 4),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused_with_the_line(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    assert f"line {line}" in refused(written(tmp_path, name, text)).message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.py", ""),
        ("plain.py", "def greet():\n    return 1\n"),
        ("bytes.py", b"\xff\xfe\x00"),
        ("null.py", b"x = 1\x00"),
        ("empty.yaml", ""),
        ("bytes.yaml", b"\xff\xfe\x00\x01"),
        ("bytes.json", b"\xff\xfe"),
        ("object.yaml", "!!python/object/apply:os.system ['true']"),
        ("bomb.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"),
        ("deep.json", b"[" * 5000),
        ("deep.yaml", b"[" * 5000),
    ],
)
def test_what_holds_no_tool_is_refused_in_words(tmp_path: Path, name: str, content: str | bytes) -> None:
    refused(written(tmp_path, name, content))


@pytest.mark.parametrize("target", ["missing.py", "missing.yaml", "missing.json", "no_such_module_anywhere", "", "."])
def test_what_is_not_there_is_refused_in_words(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(target)


def test_a_directory_is_no_source(tmp_path: Path) -> None:
    for name in ("tools.py", "tools.yaml"):
        (tmp_path / name).mkdir()
        refused(str(tmp_path / name))


@pytest.mark.parametrize(
    "execution",
    [
        None,
        {"target": "take"},
        {"target": "stock.py:nothing"},
        {"target": "stock.py:stock"},
        {"target": "nowhere.py:take"},
        {"target": "no_such_module_anywhere:take"},
        {"target": ":take"},
        {"target": "stock.py:take", "handlers": {"preview": "stock.py:nothing"}},
        {"target": "stock.py:take", "handlers": {"unheard_of": "stock.py:take"}},
    ],
)
def test_a_manifest_that_points_nowhere_is_refused(tmp_path: Path, execution: Json | None) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    document = {name: value for name, value in (MANIFEST | {"execution": execution}).items() if value is not None}
    with pytest.raises(Failure) as caught:
        load(written(tmp_path, "take.json", orjson.dumps(document)))
    assert caught.value.code == "E3105"


async def test_a_manifest_that_claims_handlers_it_does_not_have_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    document = MANIFEST | {"execution": {"target": "stock.py:take"}}
    async with Interlock.open(tmp_path / "home") as app:
        try:
            [answer] = await app.add_from(written(tmp_path, "take.json", orjson.dumps(document)))
        except Failure as failure:
            assert failure.code == "E3105"  # noqa: PT017 - a refusal may also be an answer
        else:
            assert not answer.admitted


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
keywords = st.sampled_from(
    [
        "type",
        "properties",
        "required",
        "examples",
        "enum",
        "$ref",
        "$defs",
        "items",
        "anyOf",
        "x-sensitivity",
        "default",
    ]
)
schemas = st.recursive(
    st.booleans() | st.sampled_from(["string", "object", "#", "#/$defs/a", "#/properties/a", ""]) | st.integers(-2, 2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keywords | st.sampled_from(["a", "b"]), inner, max_size=4)
    ),
    max_leaves=15,
)
edits = st.dictionaries(st.sampled_from(sorted(MANIFEST)), anything, max_size=2) | st.fixed_dictionaries(
    {}, optional={"parameters": schemas, "result_schema": schemas, "error_schema": schemas}
)


def judged(document: Any) -> None:
    """Read a manifest and judge it; nothing but a Failure may come of it."""
    try:
        manifest = parse_manifest(document)
        examine(manifest, "digest", {}, None)
    except Failure as failure:
        assert failure.code == "E3105"  # noqa: PT017 - most inputs are refused, some are not


@settings(max_examples=300, deadline=None)
@given(document=anything)
def test_arbitrary_json_as_a_manifest_is_refused_and_never_a_crash(document: Any) -> None:
    judged(document)


@settings(max_examples=400, deadline=None)
@given(edit=edits)
def test_a_manifest_with_arbitrary_fields_is_judged_and_never_a_crash(edit: Json) -> None:
    judged(MANIFEST | edit)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=anything, suffix=st.sampled_from([".json", ".yaml"]))
def test_a_file_of_arbitrary_json_is_refused_and_never_a_crash(tmp_path: Path, document: Any, suffix: str) -> None:
    with pytest.raises(Failure) as caught:
        load(written(tmp_path, f"any{suffix}", orjson.dumps([document])))
    assert caught.value.code == "E3105"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text().map(str.encode), suffix=st.sampled_from([".json", ".yaml"]))
def test_a_file_of_arbitrary_bytes_is_refused_and_never_a_crash(tmp_path: Path, content: bytes, suffix: str) -> None:
    try:
        _, tools = load(written(tmp_path, f"bytes{suffix}", content))
    except Failure as failure:
        assert failure.code == "E3105"  # noqa: PT017 - most bytes are refused, some hold an empty list
    else:
        assert tools == []


# What runs is what was admitted


@pytest.mark.shows("Python function", "changed definitions")
@pytest.mark.sqlite_only("where machines share a store, the text of the whole module is compared (ADR 39)")
async def test_a_file_that_changed_after_admission_is_refused(tmp_path: Path) -> None:
    target = written(tmp_path, "greetings.py", PYTHON)
    async with Interlock.open(tmp_path / "home") as app:
        await app.add_from(target)
    written(tmp_path, "greetings.py", PYTHON.replace("hello", "go away"))
    async with Interlock.open(tmp_path / "home") as app:
        error = (await app.call("demo.greet", name="ann")).error
        assert error is not None
        assert error.code == "E3108"
        assert "new version" in error.message
        # The other tool of the file is as it was admitted.
        assert (await app.call("demo.leave", name="ann")).unwrap() == "goodbye ann"


@pytest.mark.sqlite_only("where machines share a store, the text of the whole module is compared (ADR 39)")
async def test_a_comment_is_not_a_change(tmp_path: Path) -> None:
    target = written(tmp_path, "greetings.py", PYTHON)
    async with Interlock.open(tmp_path / "home") as app:
        await app.add_from(target)
    commented = PYTHON.replace('    return f"hello', '    # politely\n\n    return f"hello')
    written(tmp_path, "greetings.py", commented)
    async with Interlock.open(tmp_path / "home") as app:
        assert (await app.call("demo.greet", name="ann")).unwrap() == "hello ann"


async def test_the_code_behind_a_manifest_may_not_change_either(tmp_path: Path) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    target = written(tmp_path, "take.json", orjson.dumps(MANIFEST))
    async with Interlock.open(tmp_path / "home") as app:
        await app.add_from(target)
    written(tmp_path, "stock.py", HANDLERS.replace("-= count", "-= 2 * count"))
    async with Interlock.open(tmp_path / "home") as app:
        error = (await app.call("shop.take", item="tea", count=1, key="one")).error
        assert error is not None
        assert error.code == "E3108"


@pytest.mark.sqlite_only("where machines share a store, the text of the whole module is compared (ADR 39)")
async def test_a_tool_that_is_gone_from_its_file_says_so(tmp_path: Path) -> None:
    target = written(tmp_path, "greetings.py", PYTHON)
    async with Interlock.open(tmp_path / "home") as app:
        await app.add_from(target)
    written(tmp_path, "greetings.py", PYTHON.partition("@tool")[0] + "@tool" + PYTHON.rpartition("@tool")[2])
    async with Interlock.open(tmp_path / "home") as app:
        error = (await app.call("demo.greet", name="ann")).error
        assert error is not None
        assert error.code == "E3108"
    os.unlink(target)
    async with Interlock.open(tmp_path / "home") as app:
        error = (await app.call("demo.leave", name="ann")).error
        assert error is not None
        assert (error.code, error.row.error_code, error.retryable) == ("E3108", "PRECONDITION_FAILED", False)
        assert "no such file: `greetings.py`" in error.message
        assert "interlock tools add" in error.resolution
    written(tmp_path, "greetings.py", "raise OSError('/a/private/place')")
    async with Interlock.open(tmp_path / "home") as app:
        error = (await app.call("demo.leave", name="ann")).error
        assert error is not None
        assert error.code == "E3108"
        assert "`greetings.py` cannot be loaded, line 1" in error.message
        assert "private" not in error.message
    written(tmp_path, "greetings.py", PYTHON)
    async with Interlock.open(tmp_path / "home") as app:
        assert (await app.call("demo.leave", name="ann")).unwrap() == "goodbye ann"


async def test_a_finished_key_is_answered_though_the_code_is_gone(tmp_path: Path) -> None:
    written(tmp_path, "stock.py", HANDLERS)
    target = written(tmp_path, "take.json", orjson.dumps(MANIFEST))
    async with Interlock.open(tmp_path / "home") as app:
        await app.add_from(target)
        first = (await app.call("shop.take", item="tea", count=1, key="one")).unwrap()
    os.unlink(tmp_path / "stock.py")
    async with Interlock.open(tmp_path / "home") as app:
        again = await app.call("shop.take", item="tea", count=1, key="one")
        assert (again.unwrap(), again.replayed) == (first, True)
        other = await app.call("shop.take", item="tea", count=2, key="one")
        assert (other.error and other.error.code) == "E3306"
        wishes: list[Json] = [{"key": "two"}, {"key": "one", "dry_run": True}, {"key": "one", "session": "other"}, {}]
        for asked in wishes:
            refused = await app.call("shop.take", {"item": "tea", "count": 1}, **asked)
            assert (refused.error and refused.error.code) == "E3108", asked
        undone = await app.undo(again.metadata["original_invocation_id"], key="undo")
        assert (undone.error and undone.error.code) == "E3108"
        held = app.journal.reader.all("SELECT count(*) FROM reservation")[0][0]
        assert held == 1, "a call that cannot run takes no key"


async def test_an_edit_of_equal_length_within_the_same_second_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    target = written(tmp_path, "greetings.py", PYTHON)
    early, late = 1_700_000_000_100_000_000, 1_700_000_000_900_000_000
    os.utime(target, ns=(early, early))
    async with Interlock.open(tmp_path / "home") as app:
        await app.add_from(target)
        written(tmp_path, "greetings.py", PYTHON.replace("1.0.0", "1.0.1").replace("hello", "howdy"))
        os.utime(target, ns=(late, late))
        assert [answer.tool for answer in await app.add_from(target)] == ["demo.greet@1.0.1", "demo.leave@1.0.1"]
        assert (await app.call("demo.greet", name="ann")).unwrap() == "howdy ann"
