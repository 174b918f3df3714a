"""Versions of tools as they are read from the store: rows, manifests that were read before, and texts of tools."""

from __future__ import annotations

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.registry.tool_code import admitted_source, all_sources, runs_from_text, stored_text_of
from interlock.registry.version import Content
from interlock.store import registry_changes, tools
from interlock.store.port import Reader

_ONE_BY_ONE = 100  # above this number of manifests, all are read in one statement
_MOST_TRIES = 4  # of reading what has changed, while other processes change more


class SomeVersions(NamedTuple):
    """The versions of some tools, each with the digest of the text that loading it executes."""

    addresses: frozenset[str]
    versions: list[tuple[tools.ToolVersionRow, str | None]]


class StoredVersions:
    """Reads versions, and remembers what of them does not change."""

    def __init__(self, *, shared: bool) -> None:
        # Whether several machines use the store, each with an installation of its own.
        self._shared = shared
        # By the digest of the content.
        self.contents: dict[str, Content] = {}
        # The texts of sandboxed tools, by the digest of the tool's content, or why one cannot be used.
        self.texts: dict[str, bytes | Failure] = {}

    def read_some(self, reader: Reader, *, epoch: int, pending: frozenset[str]) -> SomeVersions | None:
        """Read some tools, and others that change meanwhile, so that all are as they were at one moment.

        None if it is not known which those are.
        """
        for _ in range(_MOST_TRIES):
            since = registry_changes.since(reader, epoch)
            if since.addresses is None or len(pending | since.addresses) > registry_changes.MOST:
                return None
            addresses = pending | since.addresses
            stored = self._with_manifests(reader, tools.versions_of(reader, addresses)) if addresses else []
            read = [(one, admitted_source(reader, one.digest)) for one in stored]
            self._read_texts(reader, {one.digest: source for one, source in read})
            if registry_changes.epoch(reader) == since.epoch:
                return SomeVersions(addresses, read)
        return None

    def read_all(self, reader: Reader) -> tuple[list[tools.ToolVersionRow], dict[str, str]]:
        """Read every version in one statement, and the digests of the texts that loading them executes."""
        # Manifests are most of the data, and those read before are known by their digests.
        stored = tools.all_without_manifests(reader)
        if sum(one.digest not in self.contents for one in stored) > _ONE_BY_ONE:
            stored = tools.all_versions(reader)
        else:
            stored = self._with_manifests(reader, stored)
        sources = all_sources(reader)
        self._read_texts(reader, {one.digest: sources.get(one.digest) for one in stored})
        return stored, sources

    def read_versions(self, reader: Reader, address: str) -> list[tuple[tools.ToolVersionRow, str | None]]:
        """Read the versions of a tool, each with the digest of the text that loading it executes."""
        read = [(one, admitted_source(reader, one.digest)) for one in tools.versions(reader, address)]
        self._read_texts(reader, {one.digest: source for one, source in read})
        return read

    def _read_texts(self, reader: Reader, sources: dict[str, str | None]) -> None:
        """Read the texts of sandboxed tools on a shared store now, because binding a version cannot wait for a read."""
        for digest, source in sources.items() if self._shared else ():
            if runs_from_text(source) and not isinstance(self.texts.get(digest), bytes):
                text = stored_text_of(reader, digest)
                if text is not None:
                    self.texts[digest] = text

    def _with_manifests(self, reader: Reader, stored: list[tools.ToolVersionRow]) -> list[tools.ToolVersionRow]:
        """The same rows, with the manifests of those that were not read before."""
        return [
            one if one.digest in self.contents else one._replace(manifest=tools.manifest(reader, *one[:3]))
            for one in stored
        ]
