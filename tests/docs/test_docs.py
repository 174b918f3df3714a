"""The documentation holds: its examples run and print what it says, its links lead somewhere, its tables are current.

A page is played from top to bottom in a directory and a home of its own. Python blocks share one module; a block after
`<!-- file: NAME -->` is saved under that name; console blocks are typed into a shell; a text block after a Python block
is what that block prints. Times, ids and hashes differ from run to run and are left out of the comparison, but an id
that a page shows stands for the id of this run wherever the page uses it again. A line `…` stands for any lines.
`<!-- not run: REASON -->` exempts the block after it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import interlock
from docs import generate, python_reference
from interlock import integrations
from tests.support import forked
from tests.support.each import each
from tests.support.pages import Player, blocks_of
from tests.support.source import ROOT

WRITTEN = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")] + sorted((ROOT / "docs").rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PLAYED = [page for page in WRITTEN if any(block.kind in ("python", "console") for block in blocks_of(page))]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an `interlock` for shells that need not load everything anew."""
    directory = tmp_path_factory.mktemp("programs")
    program = "import sys; sys.argv[0] = 'interlock'; from interlock.cli import main; main()"
    script = directory / "interlock"
    script.write_text(f'#!/bin/sh\nexec {shlex.join([*forked.python(), "-c", program])} "$@"\n')
    script.chmod(0o755)
    return directory


@pytest.mark.timeout(600)  # a page types dozens of commands
@pytest.mark.parametrize("page", PLAYED, ids=name_of)
def test_the_examples_of_a_page_run_and_print_what_it_says(
    page: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("INTERLOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("INTERLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", str(tmp_path / "ledger.jsonl"))
    places = (str(programs), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(places))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))  # a page that runs pytest keeps its files here
    # Plugins that come with other packages here, and take seconds to load in each run of pytest.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:schemathesis -p no:langsmith_plugin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    blocks = blocks_of(page)
    module = ModuleType(re.sub(r"\W", "_", page.stem.lower()))
    names = {module.__name__, *(Path(block.file).stem for block in blocks if block.file)}
    for name in names:
        monkeypatch.setitem(sys.modules, name, module)
    Player(name_of(page), tmp_path, module).play(blocks)


@each("page", WRITTEN)
def test_whoever_exempts_a_block_says_why(page: Path) -> None:
    for block in blocks_of(page):
        assert block.exempt is None or len(block.exempt) > 10, f"{name_of(page)}:{block.line}"
    orders = len(re.findall(r"<!-- (?:not run|file):", page.read_text()))
    assert orders == sum(1 for block in blocks_of(page) if block.exempt or block.file), "an order without a block"


def test_the_generated_pages_and_schemas_are_up_to_date() -> None:
    assert generate.differences() == []


def test_every_public_name_has_its_place_and_an_example_on_the_page_of_python_names() -> None:
    placed = [name for names in python_reference.GROUPS.values() for name in names]
    assert sorted(placed) == sorted(interlock.__all__)
    others = [name for names in python_reference.OTHERS.values() for name in names]
    assert {name.removeprefix("interlock.integrations.") for name in others} >= set(integrations.__all__)
    assert list(python_reference.examples()) == placed + others, "an example for each name, in the order of the page"
    for name, example in python_reference.examples().items():
        short = name.rpartition(".")[2]
        assert re.search(rf"\b{re.escape(short)}\b", example.code), f"the example of {name} does not use it"


_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text()))
    return (match[1] for match in _LINK.finditer(text))


def anchors_of(page: Path) -> set[str]:
    text = _FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@each("page", WRITTEN)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    for link in links_of(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert target.is_relative_to(ROOT), f"{name_of(page)} links outside the repository: {link}"
        assert not anchor or anchor in anchors_of(target), f"{name_of(page)} links to {link}: no such heading"


# A path of a module in a code mark, such as `reports.py` or `interlock dev tools.py`.
_MARK = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w./*-])(?:[\w-]+/)*\w+\.py\b(?![\w/*])")
# Stand for a file of the reader.
_PLACEHOLDERS = {"FILE.py", "file.py", "shop.py"}


@pytest.fixture(scope="module")
def sources() -> set[str]:
    """The paths of all modules of the repository, also by their last parts."""
    folders = ("src", "tests", "bench", "docs", "training", "packages", "deploy")
    files = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {"/".join(file.parts[at:]) for file in [*files, Path("hatch_build.py")] for at in range(len(file.parts))}


@each("page", WRITTEN)
def test_every_module_that_a_page_names_exists(page: Path, sources: set[str]) -> None:
    """A file of the page's own examples is in one of its blocks, or in the mark before a block."""
    text = page.read_text()
    named = {file for mark in _MARK.finditer(_FENCED.sub("", text)) for file in _FILE.findall(mark[1])}
    examples = {file for block in _FENCED.findall(text) for file in _FILE.findall(block)}
    examples |= set(re.findall(r"<!-- file: (\S+) -->", text))
    assert named - sources - examples - _PLACEHOLDERS == set()


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    pending = [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        paths = (link.partition("#")[0] for link in links_of(page) if "://" not in link)
        pending += [(page.parent / path).resolve() for path in paths if path]
    assert [name_of(page) for page in WRITTEN if page not in seen] == []


def test_the_index_lists_every_decision() -> None:
    listed = set(links_of(ROOT / "docs" / "index.md"))
    assert [one.name for one in sorted((ROOT / "docs" / "adr").glob("0*.md")) if f"adr/{one.name}" not in listed] == []


# Directories of somebody's machine; an example's home is relative or below /srv, or that of the unit of systemd.
_MACHINE = re.compile(
    r"(?<![\w.~-])(?:/(?:home|root|tmp|work|Users|private|opt|mnt|var(?!/lib/interlock\b))/|[A-Z]:\\)"
)


@each("page", WRITTEN)
def test_no_page_names_a_place_on_somebodys_machine(page: Path) -> None:
    assert _MACHINE.search(page.read_text()) is None


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
