"""The text of a sandboxed tool is part of its version: what was admitted runs, whatever became of the file since."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

from interlock import Interlock
from interlock.api.doctor.tools import check_tools
from interlock.contract.contract import contract_of
from interlock.contract.function_identity import implementation_digest
from interlock.data.schema import Json
from interlock.registry.source import load
from interlock.store.homes import home_at
from tests.support.calls import admit
from tests.support.tool_modules import SOURCE


async def test_an_edited_file_is_not_what_runs_and_is_another_version(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "pinned_tool.py"
    file.write_text(SOURCE)
    (say,) = load(str(file))[1]
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, say)
        assert (await app.call("pinned.say")).unwrap() == "as admitted"
        # Neither the function nor its handlers are edited, only what they call.
        file.write_text(SOURCE.replace("as admitted", "as edited"))
        assert (await app.call("pinned.say")).unwrap() == "as admitted"
    (edited,) = load(str(file))[1]
    assert contract_of(edited.manifest).digest != contract_of(say.manifest).digest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A directory that modules are imported from. None of its modules stays loaded."""
    directory = tmp_path / "place"
    directory.mkdir()
    monkeypatch.setattr(sys, "path", [str(directory), *sys.path])
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield directory
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _forget(place: Path) -> None:
    """Forget the modules of a place, as a new process would not know them."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(place)):
            del sys.modules[name]
    importlib.invalidate_caches()


_TOOL = """
from interlock import tool
{imports}

@tool(version="1.0.0", mutation_class="read_only", namespace="pinned", sandbox=True, timeout_s=20)
def {name}() -> str:
    "Say what the helper says."
    {lazily}
    return word()
"""


def _tool(name: str, imports: str = "", lazily: str = "") -> str:
    return _TOOL.format(name=name, imports=imports, lazily=lazily)


# The files of each tool, where the tool is, and which helper is edited.
_PLACES = {
    "beside": (  # a module beside it
        {"beside_tool.py": _tool("beside", imports="from beside_helper import word"),
         "beside_helper.py": "from beside_words import WORD\ndef word(): return WORD",
         "beside_words.py": "WORD = 'as admitted'"},
        "beside_tool.py", "beside_words.py",
    ),
    "lazy": (  # imported when it runs
        {"lazy_tool.py": _tool("lazy", lazily="from lazy_helper import word"),
         "lazy_helper.py": "def word(): return 'as admitted'"},
        "lazy_tool.py", "lazy_helper.py",
    ),
    "kin": (  # a package, by relative names; the tool has its name
        {"kin/__init__.py": "", "kin/tools.py": _tool("kin", imports="from .deep import word"),
         "kin/deep/__init__.py": "from ..words import word", "kin/words.py": "def word(): return 'as admitted'"},
        "kin.tools", "kin/words.py",
    ),
    "kith": (  # a package, by whole names
        {"kith/__init__.py": "WORD = 'as admitted'", "kith/words.py": "from kith import WORD\ndef word(): return WORD",
         "kith/tools.py": _tool("kith", imports="from kith.words import word")},
        "kith.tools", "kith/__init__.py",
    ),
}  # fmt: skip


def _write(place: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)


async def _add(app: Interlock, place: Path, target: str) -> None:
    (added,) = await app.add_from(str(place / target) if (place / target).is_file() else target)
    assert added.admitted, added.verdict


async def _says(app: Interlock, name: str) -> None:
    assert (await app.call(f"pinned.{name}")).unwrap() == "as admitted"


async def _has_changed(app: Interlock, name: str) -> None:
    """A tool with an edited file is refused. If machines share the store, it runs as admitted, from the text there."""
    if not app.home.near:
        await _says(app, name)
        return
    error = (await app.call(f"pinned.{name}")).error
    assert error is not None, name
    assert (error.code, "has changed since it was admitted" in error.message) == ("E3108", True), name


async def test_an_edited_helper_is_not_what_runs_and_is_another_version(home: Path, place: Path) -> None:
    for files, _, _ in _PLACES.values():
        _write(place, files)
    async with Interlock.open(home, housekeeping=False) as app:
        for name, (_, target, _) in _PLACES.items():
            await _add(app, place, target)
            await _says(app, name)
        for name, (files, _, helper) in _PLACES.items():
            (place / helper).write_text(files[helper].replace("as admitted", "as edited"))
            await _says(app, name)
    _forget(place)
    async with Interlock.open(home, housekeeping=False) as app:
        for name, (files, _, helper) in _PLACES.items():
            await _has_changed(app, name)
            (place / helper).write_text(files[helper])
    _forget(place)
    async with Interlock.open(home, housekeeping=False) as app:
        for name in _PLACES:
            await _says(app, name)


_MANIFEST: Json = {
    "tool_id": "listed", "namespace": "pinned", "version": "1.0.0", "name": "Say", "provider": "local",
    "description": "Say what the helper says.", "protocol": "native", "mutation_class": "read_only",
    "parameters": {"type": "object", "properties": {}}, "result_schema": {"type": "string"},
    "required_permissions": [], "idempotency": {}, "observability": {}, "timeout_class": "long_running",
    "restart_safe": True, "sandbox": {}, "execution": {"target": "listed_tool.py:say"},
}  # fmt: skip
# The files of each tool, where the tool is, and those whose statements are executed when it is loaded.
_LOADED: dict[str, tuple[dict[str, str], str, tuple[str, ...]]] = {
    **{
        which: (files, target, tuple(name for name in files if name != "lazy_helper.py"))
        for which, (files, target, _) in _PLACES.items()
    },
    "listed": (  # a manifest
        {"listed.json": json.dumps(_MANIFEST), "listed_tool.py": "def say(): return 'as admitted'"},
        "listed.json", ("listed_tool.py",),
    ),
    "above": (  # a package above that it does not import
        {"above/__init__.py": "import above.other", "above/other.py": "",
         "above/tools.py": _tool("above", imports="def word(): return 'as admitted'")},
        "above.tools", ("above/__init__.py", "above/other.py", "above/tools.py"),
    ),
}  # fmt: skip


async def test_no_statement_of_an_edited_file_is_executed_here(home: Path, place: Path, tmp_path: Path) -> None:
    """One file of each tool is edited at a time."""
    ran = tmp_path / "ran"
    for files, _, _ in _LOADED.values():
        _write(place, files)
    async with Interlock.open(home, housekeeping=False) as app:
        for _, target, _ in _LOADED.values():
            await _add(app, place, target)
    for number in range(max(len(edited) for _, _, edited in _LOADED.values())):
        _forget(place)
        now = {which: edited[number] for which, (_, _, edited) in _LOADED.items() if number < len(edited)}
        for which, name in now.items():
            (place / name).write_text(f"{_LOADED[which][0][name]}\nopen({str(ran)!r}, 'w').close()\n")
        async with Interlock.open(home, housekeeping=False) as app:
            for which in now:
                await _has_changed(app, which)
        broken = {one.what for one in check_tools(home_at(home)) if one.status == "broken"}
        near = home_at(home).near
        assert broken == {f"pinned.{which}@1.0.0 cannot be called: it has changed" for which in now if near}
        assert not ran.exists(), now
        for which, name in now.items():
            (place / name).write_text(_LOADED[which][0][name])
    _forget(place)
    async with Interlock.open(home, housekeeping=False) as app:
        for which in _LOADED:
            await _says(app, which)
    assert [one.status for one in check_tools(home_at(home))] == ["good"]


async def test_of_the_package_of_a_tool_nothing_is_loaded_that_was_not_pinned(home: Path, place: Path) -> None:
    (place / "closed").mkdir()
    (place / "closed/__init__.py").write_text("")
    (place / "closed/words.py").write_text("def word(): return 'as found'")
    lazily = """import importlib
    try:
        word = importlib.import_module("closed.wor" + "ds").word
    except ModuleNotFoundError as error:
        return str(error)"""
    (place / "closed/tools.py").write_text(_tool("closed", lazily=lazily))
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, *load("closed.tools")[1])
        assert (await app.call("pinned.closed")).unwrap() == "`closed` did not come with this tool"


@pytest.mark.parametrize("comment", ["# A word.\n{}", "{}\n# A word.\n", "{}  # A word."])
def test_the_text_of_a_sandboxed_tool_is_covered_to_the_letter_and_of_another_without_comments(
    place: Path, comment: str
) -> None:
    def digests(text: str) -> tuple[str | None, str | None]:
        (place / "letter.py").write_text(text)
        (say,) = load(str(place / "letter.py"))[1]
        assert say.manifest.execution is not None
        return say.manifest.execution.implementation, implementation_digest(say.function)

    before, after = digests(SOURCE), digests(comment.format(SOURCE.rstrip()))
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_a_comment_at_the_end_of_a_function_is_no_change(place: Path) -> None:
    def digest(text: str) -> str | None:
        (place / "ending.py").write_text(text)
        (say,) = load(str(place / "ending.py"))[1]
        return implementation_digest(say.function)

    assert digest(SOURCE) == digest(SOURCE + "    # Nothing follows.\n")
