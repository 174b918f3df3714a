"""The code that tools were admitted with, and whether what is on this machine is the same.

Machines that share a store have installations of their own, and tools that are not isolated run code of those.

The digest of such a tool covers its functions, and the modules around them may change: on one machine that is the
author's own business. Machines that share a store would run other code under the same name and version. So the code is
identified when the tool is admitted, by the text of its module and of the modules beside it, and by the distribution
that it was installed with. A machine whose code is another refuses the tool before it loads anything.

A tool that is added again with other code around the same functions may run with either, as an upgrade of the machines
one by one needs it. That is on record. Distributions that the code depends on are not compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from interlock.core.errors import Failure
from interlock.store import facts, tool_sources
from interlock.store.port import Reader, Transaction

if TYPE_CHECKING:
    from interlock.contract.declare import Tool
    from interlock.contract.manifest import Manifest


def code_of(manifest: Manifest, origin: str, manifests: Path) -> str | None:
    """Identify the code of a tool as it is on this machine, loading nothing: SHA256, or SHA256@NAME==VERSION.

    None for tools that are isolated, run no Python function or came from the program itself, and if no file is found.
    """
    from interlock.contract.pinned_source import source_digest
    from interlock.registry.source import located

    if manifest.sandbox is not None or manifest.execution is None or not manifest.runs_as.in_process:
        return None
    found = located(manifest, origin, manifests)
    digest = None if found is None else source_digest(*found)
    if found is None or digest is None:
        return None
    installed = _distribution(*found)
    return f"{digest}@{installed}" if installed else digest


def code_here(manifest: str, origin: str, manifests: Path) -> str | None:
    """The same for a tool whose manifest is JSON."""
    from interlock.contract.manifest import parse_manifest

    return code_of(parse_manifest(orjson.loads(manifest)), origin, manifests)


def refuse_other_code(here: str | None, admitted: str, origin: str) -> None:
    """Refuse (E3108) code that is not among what was admitted, which is a list of identities with spaces between."""
    known = admitted.split()
    if here in known:
        return
    needed = sorted({one.partition("@")[2] for one in known} - {""})
    where = origin.partition(":")[2]
    if needed:
        advice = f"install {' or '.join(needed)} on this machine"
    else:
        advice = f"copy `{Path(where).name}` and the modules beside it from the machine where the tool was added"
    if here is None:
        words = "its code is not on this machine"
    else:
        words = "this machine has other code for it than was admitted"
        if there := here.partition("@")[2]:
            words += f": {there}"
        advice += f"; or allow the code that is here as well: interlock tools add {where}"
    raise Failure("E3108", words, resolution=advice, details={"where": words, "install": advice})


def _distribution(file: Path, package: str) -> str:
    """NAME==VERSION of the distribution that a module belongs to; empty for one that was not installed."""
    from importlib import metadata

    top = package.partition(".")[0] or file.stem
    for name in metadata.packages_distributions().get(top, ()):
        found = metadata.distribution(name)
        if any(Path(str(found.locate_file(one))).resolve() == file for one in found.files or ()):
            return f"{name}=={found.version}"
    return ""


# A fact for each content of an isolated tool: the digest of the text that loading it executes.
_SOURCE = "source:"
# A fact for each content of a tool that is not isolated: the code that it may run with.
_CODE = "code:"
_NATIVE = "native "


def remember_source(transaction: Transaction, digest: str, source: str) -> None:
    """Store the digest of the text that is executed when a tool of this content is loaded."""
    facts.put(transaction, f"{_SOURCE}{digest}", source)


def allow_code(transaction: Transaction, digest: str, code: str) -> bool:
    """Let a tool of this content run with this code as well. Returns whether it was not allowed before."""
    known = (facts.get(transaction, f"{_CODE}{digest}") or "").split()
    if code in known:
        return False
    facts.put(transaction, f"{_CODE}{digest}", " ".join((*known, code)))
    return True


def admitted_source(reader: Reader, digest: str) -> str | None:
    """The text that was executed when a tool of this content was admitted: its digest if the tool is isolated, else
    the code that it may run with; None where none is stored.
    """
    if (source := facts.get(reader, f"{_SOURCE}{digest}")) is not None:
        return source
    code = facts.get(reader, f"{_CODE}{digest}")
    return None if code is None else _NATIVE + code


def all_sources(reader: Reader) -> dict[str, str]:
    """The same of all tools, by the digest of their content."""
    native = {name.removeprefix(_CODE): _NATIVE + value for name, value in facts.between(reader, _CODE, "code;")}
    return native | {name.removeprefix(_SOURCE): value for name, value in facts.between(reader, _SOURCE, "source;")}


def source_changed(admitted: str | None, manifest: str, origin: str, manifests: Path) -> bool:
    """Whether loading an isolated tool would execute another text than when it was admitted.

    Nothing is executed to find out. False where nothing was stored: the tool is not isolated, or its text is not in a
    file.
    """
    if admitted is None or admitted.startswith(_NATIVE):
        return False
    from interlock.contract.manifest import parse_manifest
    from interlock.registry.source import source_of

    return source_of(parse_manifest(orjson.loads(manifest)), origin, manifests) != admitted


def native_code(admitted: str | None) -> str | None:
    """The code that a tool which is not isolated may run with; None for others, and where none is stored."""
    return admitted.removeprefix(_NATIVE) if admitted is not None and admitted.startswith(_NATIVE) else None


def reload_admitted(admitted: str | None, manifest: str, origin: str, manifests: Path) -> list[Tool[..., Any]] | None:
    """Load the tools of an origin; None, and nothing is executed, if the text of an isolated tool is another."""
    from interlock.registry.source import reload

    return None if source_changed(admitted, manifest, origin, manifests) else reload(origin, manifests)


def runs_from_text(admitted: str | None) -> bool:
    """Whether a tool is isolated and its text was in a file when it was admitted."""
    return admitted is not None and not admitted.startswith(_NATIVE)


def stored_text_of(reader: Reader, digest: str) -> bytes | Failure | None:
    """The text of a sandboxed tool in the store, or why it cannot be used; None if there is none."""
    try:
        return tool_sources.get(reader, digest)
    except Failure as failure:
        return failure


def tool_from_text(manifest: str, text: bytes | Failure) -> Tool[..., Any]:
    """A sandboxed tool, made of its text, so that it needs no file. E3103 or E3804 if the text is another one."""
    from interlock.contract.manifest import parse_manifest
    from interlock.contract.source_text import tool_of_text

    if isinstance(text, Failure):
        raise text
    return tool_of_text(parse_manifest(orjson.loads(manifest)), text)


def stored_tool(manifest: str, origin: str) -> Tool[..., Any] | None:
    """A tool of which all is in the store: that of an upstream, or a program that a manifest describes.

    So machines that share the store need no file of it. None for every other tool.
    """
    from interlock.contract.manifest import parse_manifest
    from interlock.contract.manifest_tools import without_function

    kind = origin.partition(":")[0]
    if kind not in ("upstream", "manifest"):
        return None
    parsed = parse_manifest(orjson.loads(manifest))
    return None if kind == "manifest" and parsed.runs_as.in_process else without_function(parsed)
