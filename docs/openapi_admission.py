"""Prints how many operations of OpenAPI documents become tools, and why the others do not, as a page.

    python -m docs.openapi_admission NAMED... --sample DIRECTORY --source NAME > docs/explanation/openapi-documents.md

NAMED are documents that get a row of their own. `--sample` draws documents at random from a directory, always the same
ones, and sums them up. Nothing is called: an operation counts as admitted if its manifest passes all conditions of
admission except the contract tests, which need the service.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from interlock.core.errors import Failure
from interlock.upstreams import openapi
from interlock.upstreams.manifests import import_all
from interlock.upstreams.openapi_content import PARTLY_CHECKED, UNCHECKED

_SEED, _SAMPLE = 7, 310
_OPERATION = re.compile(rb'"(get|put|post|delete|options|head|patch|trace)"\s*:\s*\{')
_PAGE = """# OpenAPI documents

How many operations of public OpenAPI documents become tools. This page is the output of
[openapi_admission.py](../openapi_admission.py), which calls no service: an operation counts as admitted if its manifest
passes all conditions of admission except the contract tests.

*Unchecked*: the document has no schema for the result. *In part*: the schema of the result has more than 300 parts, and
the definitions nearest to the result are checked. [How to add a document](../how-to/upstreams.md).
"""


@dataclass(slots=True)
class Count:
    """The operations of one document or of several."""

    operations: int = 0
    admitted: int = 0
    unchecked: int = 0
    partly: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Count) -> None:
        self.operations += other.operations
        self.admitted += other.admitted
        self.unchecked += other.unchecked
        self.partly += other.partly
        self.reasons += other.reasons

    def row(self, name: str) -> str:
        share = 100 * self.admitted / max(self.operations, 1)
        facts = (name, f"{self.operations:,}", f"{self.admitted:,}", f"{share:.2f} %", f"{self.unchecked:,}")
        why = "; ".join(f"{number:,} × {reason}" for reason, number in self.reasons.most_common(5))
        return f"| {' | '.join(facts)} | {self.partly:,} | {why} |"


def counted(text: bytes) -> Count:
    """Read one document as `interlock upstream add openapi` does."""
    try:
        found = openapi.read(text, base_url="https://api.example.com")
    except Failure as failure:
        number = len(_OPERATION.findall(text))
        return Count(operations=number, reasons=Counter({_general(failure.message): number}))
    imported = import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=True)
    served = [one for one in imported if one.manifest is not None]
    reasons = [reason for _, reason in found.refused] + [one.refused or "" for one in imported if one.manifest is None]
    return Count(
        operations=len(found.tools) + len(found.refused),
        admitted=len(served),
        unchecked=sum(UNCHECKED in one.needs for one in served),
        partly=sum(PARTLY_CHECKED in one.needs for one in served),
        reasons=Counter(map(_general, reasons)),
    )


def _general(reason: str) -> str:
    """A reason without the names of one operation, so that equal ones are counted together."""
    return re.sub(r"`[^`]*`", "`…`", reason)[:120].replace("|", "/")


def _text(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _name(path: Path, text: bytes) -> str:
    try:
        info = openapi.parse(text).get("info") or {}
    except Failure:
        return path.name
    return f"{info.get('title', path.name)} {info.get('version', '')}".replace("|", "/").replace("\n", " ").strip()


def rows(named: Iterable[Path], directory: Path | None, number: int, source: str) -> Iterator[str]:
    """The rows of the table: one for each named document, and one for the sample."""
    yield "| Document | Operations | Admitted | | Unchecked | In part | Refused because |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for path in named:
        text = _text(path)
        yield counted(text).row(_name(path, text))
    if directory is None:
        return
    files = sorted(path for path in directory.rglob("*.json") if path.stat().st_size < 3_000_000)
    whole = Count()
    drawn = random.Random(_SEED).sample(files, min(number, len(files)))
    for path in drawn:
        whole.add(counted(_text(path)))
    yield whole.row(f"**{len(drawn)} documents drawn at random** of {len(files):,} in {source}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("named", nargs="*", type=Path)
    options.add_argument("--sample", type=Path)
    options.add_argument("--number", type=int, default=_SAMPLE)
    options.add_argument("--source", default="a directory", help="where the documents of the sample come from")
    given = options.parse_args()
    print(_PAGE)
    for row in rows(given.named, given.sample, given.number, given.source):
        print(row, flush=True)


if __name__ == "__main__":
    main()
