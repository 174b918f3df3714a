"""The code blocks of a documentation page, and what plays them."""

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
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from tests import warm

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
