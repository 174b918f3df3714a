"""The identity of a function: the place where it is found, its namespace, and a digest of its code."""

from __future__ import annotations

import hashlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

from interlock.contract.pinned_source import LOADED, Pinned


def target_of(function: Callable[..., Any]) -> str:
    """Return where a function is found: its module's own name and its qualified name, whatever file it
    was loaded from.
    """
    module = function.__module__
    name = module.rsplit(".", 1)[-1] if module.startswith(LOADED) else module
    return f"{name}:{function.__qualname__}"


def namespace_of(function: Callable[..., Any]) -> str:
    """Return the default namespace of a function: the name of its module, or of the file that is being run."""
    module = function.__module__
    if module == "__main__":
        module = PurePath(getattr(sys.modules["__main__"], "__file__", None) or "main").stem
    return re.sub(r"[^a-z0-9_]+", "_", module.rsplit(".", 1)[-1].lower()).strip("_") or "main"


_NOISE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


def implementation_digest(*functions: Callable[..., Any], pinned: Pinned | None = None) -> str | None:
    """SHA-256 over the functions' source without comments and blank lines; None if there is no source.

    `pinned`: the whole text of a tool that runs in the sandbox, covered to the letter.
    """
    try:
        return digest_of_sources(map(inspect.getsource, functions), pinned)
    except (OSError, TypeError):
        return None


def digest_of_sources(sources: Iterable[str], pinned: Pinned | None) -> str | None:
    """The same of functions whose source is known."""
    hasher = hashlib.sha256()
    for source in sources:
        text = inspect.cleandoc("\n" + source)
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except (tokenize.TokenError, IndentationError):
            return None
        tokens_ = [token for token in tokens if token.type not in _NOISE]
        # The end of the last line is present or not, depending on whether a comment follows it.
        last = max((at for at, token in enumerate(tokens_) if token.type == tokenize.NEWLINE), default=-1)
        for at, token in enumerate(tokens_):
            hasher.update(f"{token.type}:{'' if at == last else token.string}\n".encode())
    if pinned is not None:
        hasher.update(pinned.digest.encode())
    return hasher.hexdigest()
