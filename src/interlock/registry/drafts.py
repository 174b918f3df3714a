"""Drafts: versions that a developer is still writing. Only the developer's own session can call them.

A draft passes the same admission as a version, and its calls pass the same phases under the same policy. It is not
published: it stands in no table, no list and no search, so that no other process can find it. In the process that holds
it, it is found by calls of callers that hold the key of the session, an object that only the session gives out.

Drafts of 1.4.0 are 1.4.0-dev.1, 1.4.0-dev.2 and so on. The store counts them for each tool, so that a number on record
always means one content.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from interlock.call.context import Caller
from interlock.contract.refusals import DeclarationRefusal, collecting
from interlock.contract.versions import parse_version
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.registry.catalog import Catalog, contract_digest
from interlock.registry.version import Content, Row, Version
from interlock.store import facts, records

if TYPE_CHECKING:
    from interlock.contract.declare import Tool
    from interlock.store.port import Transaction, Unit

# The door that calls of drafts come through, as records name it.
DRAFTS = "dev"
_NUMBER = "draft:"  # a fact for each tool: the number of its last draft


class Drafts:
    """The drafts that one session holds in this process.

    INVARIANT: a draft is found for callers with the key of the session, and for nobody else, whatever their rights.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.key = object()
        self._held: dict[str, dict[str, Version]] = {}
        self._newest: dict[str, Version] = {}
        if catalog.find_draft is not None:
            raise Failure("E3702", "a session holds drafts in this process already")
        catalog.find_draft = self.find

    @property
    def newest(self) -> list[Version]:
        """The newest draft of every tool that is a draft now."""
        return list(self._newest.values())

    def hold(self, tools: list[Tool[..., Any]]) -> None:
        """Make these the drafts that names mean. Earlier ones are kept for what refers to them, such as an undo."""
        self._newest = {}
        for tool in tools:
            manifest = tool.manifest
            text = orjson.dumps(manifest.document()).decode()
            row = Row(manifest.address, manifest.version, contract_digest(tool), "active", text, f"{DRAFTS}:", 0, None)
            version = Version(row, lambda _, bound=tool: bound, Content(text, row.digest))
            self._held.setdefault(row.address, {})[row.version] = version
            self._newest[row.address] = version

    def find(self, caller: object, name: str, spec: str | None) -> Version | None:
        """Return the draft that a name means to a caller: the newest, or the one of exactly this version."""
        if not isinstance(caller, Caller) or caller.drafts is not self.key:
            return None
        if spec is not None:
            return self._held.get(name, {}).get(spec.lstrip("=v "))
        bare = [one for address, one in self._newest.items() if address.partition(".")[2] == name]
        return self._newest.get(name) or (bare[0] if len(bare) == 1 else None)


def draft_of(version: str, number: int) -> str:
    """Return the version of a draft: `1.4.0-dev.3` of `1.4.0`, `2.0.0-rc.1.dev.3` of `2.0.0-rc.1`."""
    parsed = parse_version(version)
    core = ".".join(map(str, parsed.core))
    return f"{core}-{'.'.join((*parsed.prerelease, 'dev', str(number)))}"


def number_draft(tool: Tool[..., Any], by: str) -> Unit[Tool[..., Any]]:
    """Unit that gives a tool the next number of its drafts, and puts on record which content has it."""
    address = tool.manifest.address

    def unit(transaction: Transaction) -> Tool[..., Any]:
        facts.increase(transaction, f"{_NUMBER}{address}")
        number = int(facts.get(transaction, f"{_NUMBER}{address}") or 1)
        draft = tool.as_version(draft_of(tool.manifest.version, number))
        ref = f"{address}@{draft.manifest.version}"
        body = records.plain(
            "registry", ref, transaction.now_ms, event="tool.drafted", tool=ref, digest=contract_digest(draft), by=by
        )
        transaction.append("registry", ref, body)
        return draft

    return unit


@dataclass(frozen=True, slots=True)
class Survey:
    """A file as it was loaded: its tools, the declarations that were refused, and what ended the loading, if anything.

    `broken` is a refusal of the file itself: the place, and what was raised there.
    """

    tools: list[Tool[..., Any]]
    refused: list[DeclarationRefusal]
    broken: DeclarationRefusal | None


class DraftSource:
    """A Python file that is loaded again and again, with the modules that it imports from its own folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._modules: set[str] = set()
        # The files whose change makes it worth loading again, and how they were found when they were loaded.
        self.files: dict[Path, Stamp | None] = {self.path: None}

    def load(self) -> Survey:
        """Load the file again. Every refused declaration is reported, not only the first."""
        # Loaded here: a call knows drafts by their origin, and needs no declarations.
        from interlock.contract.declare import tools_in
        from interlock.registry.source import load_file

        for name in self._modules:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        before, seen = set(sys.modules), {path: stamp_of(path) for path in self.files}
        tools: list[Tool[..., Any]] = []
        broken: DeclarationRefusal | None = None
        with collecting() as refused, _without_bytecode():
            try:
                tools = tools_in(vars(load_file(self.path)))
            except Failure as failure:
                broken = self._refusal(failure)
        self._modules = {name for name in set(sys.modules) - before if self._file_of(sys.modules[name]) is not None}
        found = {self.path, *(self._file_of(sys.modules[name]) for name in self._modules)}
        if broken is not None:
            # A file that could not be read to its end may import more than it got to.
            found.update(self.path.parent.glob("*.py"))
        # Of a file that was known, the state before it was loaded: a save meanwhile is a change.
        self.files = {path: seen[path] if path in seen else stamp_of(path) for path in found if path is not None}
        stand_ins = {id(one.stand_in) for one in refused}
        return Survey([tool for tool in tools if id(tool) not in stand_ins], refused, broken)

    def _file_of(self, module: ModuleType | None) -> Path | None:
        """The file of a module of the folder; None for any other, such as one of an environment that is kept there."""
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            return None
        path = Path(name).resolve()
        own = path.is_relative_to(self.path.parent) and not path.is_relative_to(Path(sys.prefix).resolve())
        return path if own and "site-packages" not in path.parts else None

    def _refusal(self, failure: Failure) -> DeclarationRefusal:
        error = failure.__cause__ or failure
        file, line = str(self.path), 0
        if isinstance(error, SyntaxError):
            file, line = error.filename or file, error.lineno or 0
        else:
            for name, number in _frames(error.__traceback__):
                if Path(name).is_relative_to(self.path.parent):
                    file, line = name, number
        words = failure.message if error is failure else f"{type(error).__name__}: {error}"
        return DeclarationRefusal(self.path.name, file, line, (words,), None)


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


@contextmanager
def _without_bytecode() -> Generator[None]:
    """Write no bytecode: a cache is trusted by second and size, which the next edit may keep."""
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = written


Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """A stamp that changes when a file is saved; None while it is missing, as when an editor replaces it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
