"""Finds the paths that the words of a command can name.

A program takes its paths from various places: behind `=`, glued to an option (`tar -C/etc`), relative to where a `cd`
or a `-C` before it led. Nobody can know every program, so the result contains too much rather than too little: each
relative word is also resolved against each absolute directory that the same command names. A command that cannot be
followed is refused (E3206).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from interlock.authority.commands import Word
from interlock.authority.normalize import climbs
from interlock.core.errors import Failure
from interlock.core.expressions import expression

# Limits on the directories that words may be relative to, and on the paths of one command.
MOST_PLACES = 300
MOST_PATHS = 1000

_GLUE = expression(r"[\s=:,;|&()<>`'\"@\[\]]+")
_URL = expression(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CHANGING = frozenset({"cd", "chdir", "pushd"})
# A directory to work in follows one of these.
_DIRECTORY = expression(r"(?:-[A-Za-z]*C|--(?:directory|chdir|cwd|wd|workdir|working-directory|work-tree))(?:=|\Z)")


def pieces(word: str) -> Iterator[str]:
    """Yield a word and the parts of it that a program may use separately."""
    yield word
    for piece in _GLUE.split(word):
        if piece and piece != word:
            yield piece
    for piece in (word, *_GLUE.split(word)):
        if piece.startswith(("-", "+")):
            yield piece[2:]
            if "/" in piece:
                yield piece[piece.index("/") :]


def paths_of(words: Sequence[Word], where: str) -> Iterator[str]:
    """Yield the relative paths in a command's words, resolved against every directory that they can be relative to."""
    listed = [list(_candidates(word.text)) for word in words]
    absolute = list(dict.fromkeys(one for candidates in listed for one in candidates if one.startswith("/")))
    places = _places(words, absolute, where)
    count = 0
    for candidates in listed:
        for one in candidates:
            if one.startswith(("/", "-")):
                continue
            bases = [*places, os.curdir] if "/" in one else places
            count += len(bases)
            if count > MOST_PATHS:
                raise Failure("E3206", f"argument `{where}` names more paths than rules can look at; split it")
            yield from (os.path.join(base, one) for base in bases)


def _candidates(word: str) -> Iterator[str]:
    if not _URL.match(word):
        yield from dict.fromkeys(piece for piece in pieces(word) if piece)


def _places(words: Sequence[Word], absolute: list[str], where: str) -> list[str]:
    """Return every directory that a relative word can be relative to, except the one that the command begins in."""
    targets = list(_targets(words, where))
    places = dict.fromkeys(absolute)
    # The order of the changes is unknown: there are loops and functions.
    for _ in targets:
        for target in targets:
            for place in [os.curdir, *places]:
                places[os.path.join(place, target)] = None
                if len(places) > MOST_PLACES + len(absolute):
                    why = "changes its directory too often for rules to follow; write whole paths"
                    raise Failure("E3206", f"argument `{where}` {why}")
    return list(places)


def _targets(words: Sequence[Word], where: str) -> Iterator[str]:
    """Yield the relative directories that a command changes to; E3206 if they cannot be determined."""
    expected = ""  # the word that a directory follows
    for word in [*words, Word("", "", True, True)]:
        text = word.text
        if expected and (word.starts or text == "-"):
            if expected in _CHANGING:
                raise _lost(where, expected)
            expected = ""
        if expected and not text.startswith("-"):
            expected = ""
            if not text.startswith("/"):
                if climbs(text):
                    raise _lost(where, "..")
                yield text
        elif word.starts and text in ("popd", "dirs"):
            raise _lost(where, text)
        elif text in _CHANGING or _DIRECTORY.match(text):
            option, mark, glued = text.partition("=")
            expected = "" if mark else option
            if mark and not glued.startswith("/"):
                yield glued


def _lost(where: str, word: str) -> Failure:
    return Failure("E3206", f"argument `{where}` changes its directory by `{word}`; write the whole path")
