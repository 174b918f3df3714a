"""Checks that the installed libraries have the versions that Interlock needs.

pip keeps them so, but not against a later `pip install "mcp<2"` for another program in the same environment. Without
this check the first use of the library fails with an ImportError that names neither the library nor the remedy.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

REMEDY = "install Interlock into an environment of its own, or let pip repair this one: pip install interlock"


def misfits() -> list[str]:
    """Name each library that is missing or has a version that Interlock cannot use."""
    found: list[str] = []
    for text in requires("interlock") or ():
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate():
            continue
        try:
            installed = version(needed.name)
        except PackageNotFoundError:
            found.append(f"{needed.name} is not installed; Interlock needs {needed.name}{needed.specifier}")
            continue
        if not needed.specifier.contains(installed, prereleases=True):
            found.append(f"{needed.name} {installed} is installed; Interlock needs {needed.name}{needed.specifier}")
    return found
