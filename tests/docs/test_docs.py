"""The documentation holds: its examples run and print what it says, its links lead somewhere, its tables are current.

A page is played from top to bottom in a directory and a home of its own. Python blocks share one module; a block after
`<!-- file: NAME -->` is saved under that name; console blocks are typed into a shell; a text block after a Python block
is what that block prints. Times, ids and hashes differ from run to run and are left out of the comparison, but an id
that a page shows stands for the id of this run wherever the page uses it again. A line `…` stands for any lines.
`<!-- not run: REASON -->` exempts the block after it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

import interlock
from docs import generate, python_reference
from interlock import integrations
from tests import warm
from tests.support import forked
from tests.support.each import each

ROOT = Path(__file__).parents[2]
WRITTEN = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")] + sorted((ROOT / "docs").rglob("*.md"))
_BLOCK = re.compile(
    r"(?:^<!-- (?P<order>not run|file): (?P<said>[^\n]*?) -->\n+)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHELL = re.compile(r"[|&;<>$`#~\\\n]")
_ID = re.compile(r"(?<![0-9A-Za-z])01[0-9A-HJKMNP-TV-Z]{24}\b")
# The pages are written by alice; who runs them is whom the kernel says.
_USER = pwd.getpwuid(os.getuid()).pw_name
_VARYING = (
    (_ID, "<id>"),
    (re.compile(rf"\blocal:(alice|{re.escape(_USER)})\b"), "local:<user>"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "<time>"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"\b\d+(\.\d+)? ?m?s\b"), "<duration>"),
    # What is left of an hour when it is told.
    (re.compile(r"\b59(\.\d)? min\b"), "1 h"),
    # A call that takes its time leaves one record more.
    (re.compile(r"\b\d+ records\b"), "<count> records"),
    # So does the position in the journal at which a list goes on.
    (re.compile(r"(?<=--before )\d+"), "<position>"),
    (re.compile(r"(?<=took ms)\s+[\d.]+"), " <duration>"),
    (re.compile(r"\b[0-9a-f]{4}…[0-9a-f]{2}\b|\b[0-9a-f]{64}\b|\b[0-9a-f]{32}\b|\b[0-9a-f]{16}\b"), "<hash>"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, and what a comment before it asks for."""

    kind: str
    text: str
    line: int
    file: str | None = None
    exempt: str | None = None


def blocks_of(page: Path) -> list[Block]:
    source = page.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(source):
        line = source.count("\n", 0, match.start("text"))
        file = match["said"] if match["order"] == "file" else None
        exempt = match["said"] if match["order"] == "not run" else None
        found.append(Block(match["kind"], match["text"], line, file, exempt))
    return found


@dataclass(frozen=True, slots=True)
class Typed:
    """A command of a console block and what the page says it prints."""

    command: str
    printed: list[str]


def typed(text: str) -> list[Typed]:
    found: list[Typed] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Typed(line[2:], []))
        else:
            found[-1].printed.append(line)
    return found


@dataclass(slots=True)
class Player:
    """Plays one page, and remembers which id of this run each id of the page stands for."""

    page: str
    directory: Path
    module: ModuleType
    ids: dict[str, str] = field(default_factory=dict[str, str])
    last: int = 0

    def play(self, blocks: list[Block]) -> None:
        printed: str | None = None
        for block in blocks:
            if block.exempt is not None:
                continue
            if block.kind == "text" and printed is not None:
                self.compare(f"{self.page}:{block.line}", block.text.splitlines(), printed)
            printed = None
            if block.file is not None:
                self.save(block)
            elif block.kind == "python":
                printed = self.run_python(block)
            elif block.kind == "console":
                for one in typed(block.text):
                    self.type(block, one)

    def save(self, block: Block) -> None:
        assert block.file is not None
        path = self.directory / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        if path.suffix == ".py":
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)

    def run_python(self, block: Block) -> str:
        # Under a file of its own, so that what looks for the source of a function finds it.
        path = self.directory / f".{self.module.__name__}_{block.line}.py"
        path.write_text("\n" * block.line + block.text)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(path.read_text(), path, "exec", dont_inherit=True), vars(self.module))
        return printed.getvalue()

    def type(self, block: Block, one: Typed) -> None:
        where = f"{self.page}:{block.line}: $ {one.command}"
        if one.command == "echo $?":
            assert one.printed == [str(self.last)], where
            return
        command = _ID.sub(lambda match: self.ids.get(match[0], match[0]), one.command)
        code, printed = self.run(command)
        killed = code < 0
        self.last = 128 - code if killed else code
        expected = 137 if killed else int(any(line.startswith(("✗", "… ")) for line in one.printed))
        assert self.last == expected, f"{where}\nexited {self.last}:\n{printed}"
        self.compare(where, one.printed, printed + ("Killed\n" if killed else ""))

    def run(self, command: str) -> tuple[int, str]:
        """What a command line exits with and prints; a shell is asked only where one is needed."""
        if command.startswith("interlock ") and not _SHELL.search(command):
            code, printed, _ = warm.run(shlex.split(command)[1:], os.environ, self.directory, merged=True)
            return code, printed.decode()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=500,
        )
        return done.returncode, done.stdout

    def compare(self, where: str, said: list[str], printed: str) -> None:
        self.ids.update(zip(_ID.findall("\n".join(said)), _ID.findall(printed), strict=False))
        pattern = "".join(".*" if line.strip() == "…" else re.escape(normal(line)) + "\n" for line in said)
        shown = "".join(f"{normal(line)}\n" for line in printed.splitlines())
        assert re.fullmatch(pattern, shown, re.DOTALL), f"{where} printed:\n{printed}"


def normal(line: str) -> str:
    """A line without what differs from run to run."""
    for pattern, word in _VARYING:
        line = pattern.sub(word, line)
    return line.strip()


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


# Directories of somebody's machine; an example's home is relative or below /srv.
_MACHINE = re.compile(r"(?<![\w.~-])(?:/(?:home|root|tmp|work|Users|private|opt|mnt|var)/|[A-Z]:\\)")


@each("page", WRITTEN)
def test_no_page_names_a_place_on_somebodys_machine(page: Path) -> None:
    assert _MACHINE.search(page.read_text()) is None


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
